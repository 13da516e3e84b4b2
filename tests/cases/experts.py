"""Mixtures of experts as model families have them, at tiny sizes; no JAX, no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Case:
    """A router and its experts; `route` are the arguments of `infer.ops.router.route`."""

    name: str
    family: str  # the folder of transformers/models
    experts: int
    k: int
    route: Mapping[str, Any] = field(default_factory=dict)
    has_bias: bool = False
    tokens: int = 37
    width: int = 32
    hidden: int = 64


CASES = (
    Case("mixtral", "mixtral", 8, 2, {"kind": "softmax", "normalize": True}),
    # The same by the paper's formula.
    Case("mixtral_paper", "mixtral", 8, 2, {"kind": "topk_softmax"}),
    Case("qwen3_moe", "qwen3_moe", 16, 4, {"kind": "softmax", "normalize": True}),
    Case("qwen3_moe_raw", "qwen3_moe", 16, 4, {"kind": "softmax"}),
    Case("gpt_oss", "gpt_oss", 16, 4, {"kind": "topk_softmax"}),
    Case(
        "deepseek_v2",
        "deepseek_v2",
        16,
        3,
        {"kind": "softmax", "num_groups": 4, "num_kept_groups": 2, "scale": 16.0},
    ),
    Case(
        "deepseek_v3",
        "deepseek_v3",
        16,
        4,
        {
            "kind": "sigmoid",
            "normalize": True,
            "num_groups": 4,
            "num_kept_groups": 2,
            "scale": 2.5,
        },
        has_bias=True,
    ),
    Case("deepseek_v3_one_group", "deepseek_v3", 8, 2, {"kind": "sigmoid"}, has_bias=True),
)


def inputs(case: Case) -> dict[str, np.ndarray]:
    """Return x, the router's weight [E, D], its bias for choosing, and the experts' weights."""
    rng = np.random.default_rng(sum(map(ord, case.name)))
    normal = lambda *shape: rng.standard_normal(shape, np.float32)
    arrays = {
        "x": normal(case.tokens, case.width),
        "router": normal(case.experts, case.width) / np.float32(4),
        "gate": normal(case.experts, case.hidden, case.width) / np.float32(6),
        "up": normal(case.experts, case.hidden, case.width) / np.float32(6),
        "down": normal(case.experts, case.width, case.hidden) / np.float32(8),
    }
    if case.has_bias:
        arrays["bias"] = normal(case.experts) / np.float32(4)
    return arrays
