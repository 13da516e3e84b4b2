"""Routes and expert layers of transformers in float32, for tests/ops/test_experts.py.

Run in the environment that scripts/peers.sh makes (torch on CPU and transformers):

    python scripts/goldens/experts.py tests/data/experts.npz

Inputs and weights are those of tests/cases/experts.py, and are not saved.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import numpy as np
import torch
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe

from tests.cases.experts import CASES, Case, inputs


def modules(case: Case) -> tuple[torch.nn.Module, torch.nn.Module | None]:
    """Return transformers' router, and its experts where they are a plain gated MLP."""
    sizes = dict(
        hidden_size=case.width,
        num_experts_per_tok=case.k,
        moe_intermediate_size=case.hidden,
        intermediate_size=case.hidden,
        num_local_experts=case.experts,
        experts_implementation="eager",
    )
    route = dict(case.route)
    groups = dict(
        n_group=route.get("num_groups", 1),
        topk_group=route.get("num_kept_groups", 1),
        routed_scaling_factor=route.get("scale", 1.0),
        norm_topk_prob=route.get("normalize", False),
    )
    if case.family == "mixtral":
        config = mixtral.MixtralConfig(**sizes)
        return mixtral.MixtralTopKRouter(config), mixtral.MixtralExperts(config)
    if case.family == "qwen3_moe":
        sizes["num_experts"] = sizes.pop("num_local_experts")
        norm = groups["norm_topk_prob"]
        config = qwen3_moe.Qwen3MoeConfig(**sizes, norm_topk_prob=norm)
        return qwen3_moe.Qwen3MoeTopKRouter(config), qwen3_moe.Qwen3MoeExperts(config)
    sizes["n_routed_experts"] = sizes.pop("num_local_experts")
    if case.family == "deepseek_v3":
        config = deepseek_v3.DeepseekV3Config(**sizes, **groups)
        return deepseek_v3.DeepseekV3TopkRouter(config), deepseek_v3.DeepseekV3Experts(config)
    if case.family == "deepseek_v2":
        method = "group_limited_greedy" if groups["n_group"] > 1 else "greedy"
        config = deepseek_v2.DeepseekV2Config(**sizes, **groups, topk_method=method)
        return deepseek_v2.DeepseekV2TopkRouter(config), deepseek_v2.DeepseekV2Experts(config)
    sizes["num_local_experts"] = sizes.pop("n_routed_experts")
    config = gpt_oss.GptOssConfig(**sizes)
    return gpt_oss.GptOssTopKRouter(config), None


@torch.no_grad()
def golden(case: Case) -> Iterator[tuple[str, np.ndarray]]:
    """Return what transformers computes: ids in the order of their weights, weights, the sum."""
    given = {name: torch.from_numpy(array) for name, array in inputs(case).items()}
    router, experts = modules(case)
    router.weight.copy_(given["router"])
    if case.family == "gpt_oss":
        router.bias.zero_()
    if "bias" in given:
        router.e_score_correction_bias.copy_(given["bias"])
    _, weights, ids = _route(router, given["x"])
    weights, ids = weights.float(), ids.int()
    yield "weights", weights.numpy()
    yield "ids", ids.numpy()
    if experts is not None:
        experts.gate_up_proj.copy_(torch.cat([given["gate"], given["up"]], dim=1))
        experts.down_proj.copy_(given["down"])
        yield "y", experts(given["x"], ids.long(), weights).numpy()


def _route(router: torch.nn.Module, x: torch.Tensor) -> tuple[Any, torch.Tensor, torch.Tensor]:
    logits, weights, ids = router(x)
    order = torch.argsort(ids, dim=-1)  # DeepSeek's are in no order
    return logits, torch.gather(weights, 1, order), torch.gather(ids, 1, order)


def main(path: str) -> None:
    saved = {f"{case.name}/{name}": a for case in CASES for name, a in golden(case)}
    np.savez_compressed(path, **saved)
    print(path, Path(path).stat().st_size, "bytes")


if __name__ == "__main__":
    main(sys.argv[1])
