"""LLM inference as pure functions in JAX, on GPU and CPU.

Names of axes, everywhere in this package: B sequences, T query tokens, S key/value tokens, D model
width, N query heads, K key/value heads, G = N / K, H head width, F feed-forward width, E experts, V
vocabulary, L layers, P pages in the pool, U tokens per page, M pages per sequence, Q quantisation
groups, R requests.

What is public is imported when it is first used, so that `import infer` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infer import eval, quant, quantization, spec
    from infer.backend import backends, use_backend
    from infer.compiling import compile_stats
    from infer.config import ModelConfig
    from infer.errors import CapacityError, ConfigError, RequestError, WeightFormatError
    from infer.generation import (
        BeamResult,
        Generation,
        GenerationResult,
        StreamState,
        beam_search,
        generate,
        load_state,
        sampling_state,
        save_state,
        score,
        stream,
    )
    from infer.llm import LLM
    from infer.model import Model, load, save
    from infer.models.params import Params
    from infer.outputs import CompletionOutput, Logprob, RequestOutput
    from infer.quant import QArray
    from infer.quantization import quantize
    from infer.sampling import SamplingParams, SamplingState
    from infer.tokenizer import Tokenizer
    from infer.weights.bundled import pull

__version__ = "0.1.0"

_HOME = {
    "BeamResult": "infer.generation",
    "LLM": "infer.llm",
    "CapacityError": "infer.errors",
    "CompletionOutput": "infer.outputs",
    "ConfigError": "infer.errors",
    "Generation": "infer.generation",
    "GenerationResult": "infer.generation",
    "Logprob": "infer.outputs",
    "Model": "infer.model",
    "ModelConfig": "infer.config",
    "Params": "infer.models.params",
    "QArray": "infer.quant",
    "RequestError": "infer.errors",
    "RequestOutput": "infer.outputs",
    "SamplingParams": "infer.sampling",
    "SamplingState": "infer.sampling",
    "StreamState": "infer.generation",
    "Tokenizer": "infer.tokenizer",
    "WeightFormatError": "infer.errors",
    "backends": "infer.backend",
    "beam_search": "infer.generation",
    "compile_stats": "infer.compiling",
    "generate": "infer.generation",
    "load": "infer.model",
    "load_state": "infer.generation",
    "pull": "infer.weights.bundled",
    "quantize": "infer.quantization",
    "sampling_state": "infer.generation",
    "save": "infer.model",
    "save_state": "infer.generation",
    "score": "infer.generation",
    "stream": "infer.generation",
    "use_backend": "infer.backend",
}
# Rooms that are public as a whole.
_ROOMS = ("eval", "quant", "quantization", "spec")
__all__ = [*sorted(_HOME), *_ROOMS, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"infer.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'infer' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_ROOMS})
