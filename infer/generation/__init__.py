"""`generate(params, prompts)`: prefill, decode, sampling and refill of slots in one XLA program."""

from infer.generation.beam_search import BeamResult, beam_search
from infer.generation.facade import TextStream, generate, stream
from infer.generation.pure import sampling_state
from infer.generation.result import Generation, GenerationResult
from infer.generation.saved import StreamState, load_state, save_state
from infer.generation.score import score

__all__ = [
    "BeamResult",
    "Generation",
    "GenerationResult",
    "StreamState",
    "TextStream",
    "beam_search",
    "generate",
    "load_state",
    "sampling_state",
    "save_state",
    "score",
    "stream",
]
