"""`generate(params, prompts)`: prefill, decode, sampling and refill of slots in one XLA program."""

from infer.generation.beam_search import BeamResult, beam_search
from infer.generation.facade import TextStream, generate, stream
from infer.generation.result import Generation, GenerationResult

__all__ = [
    "BeamResult",
    "Generation",
    "GenerationResult",
    "TextStream",
    "beam_search",
    "generate",
    "stream",
]
