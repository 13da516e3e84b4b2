"""transformers as a peer: the same GGUF file, dequantised, and `generate` with its own cache."""

import copy
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from peer_protocol import serve

_model: Any = None
# The last prompts, and the cache of all but their last tokens.
_held: tuple[list[list[int]], Any] | None = None


class _Clock(transformers.StoppingCriteria):
    """Notes when each token was there; never stops anything."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def load(path: str, threads: int, dtype: str = "float32") -> dict[str, Any]:
    """Load the file, dequantised to `dtype`."""
    global _model
    torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    start = time.perf_counter()
    file = Path(path)
    _model = transformers.AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype=getattr(torch, dtype)
    ).eval()
    # Past the end-of-sequence ids, as every engine here.
    _model.generation_config.eos_token_id = None
    _model.generation_config.pad_token_id = 0
    seconds = time.perf_counter() - start
    return {
        "load_s": seconds,
        "info": f"torch {torch.__version__}, {torch.get_num_threads()} threads, {dtype}",
        "version": transformers.__version__,
        "details": {"threads": torch.get_num_threads(), "cache": dtype},
    }


def generate(prompts: list[list[int]], new_tokens: int, reuse: bool = False) -> dict[str, Any]:
    """Greedy `generate` of exactly `new_tokens` tokens a row.

    With `reuse`, the keys and values of the prompts are computed once and copied in later calls.
    """
    global _held
    clock = _Clock()
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        cache = {}
        if reuse:
            if _held is None or _held[0] != prompts:
                _held = prompts, _model(ids[:, :-1], use_cache=True).past_key_values
            cache = {"past_key_values": copy.deepcopy(_held[1])}
        start = time.perf_counter()
        out = _model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new_tokens,
            stopping_criteria=transformers.StoppingCriteriaList([clock]),
            **cache,
        )
    return {
        "ttft_s": clock.times[0] - start,
        "decode_s": clock.times[-1] - clock.times[0],
        "tokens": out[:, ids.shape[1] :].tolist(),
    }


if __name__ == "__main__":
    serve({"load": load, "generate": generate})
