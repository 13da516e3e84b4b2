"""`generate(params, prompts)`: prefill, decode, sampling and refill of slots in one XLA program."""

from infer.generation.facade import TextStream, generate, stream
from infer.generation.result import Generation, GenerationResult

__all__ = ["Generation", "GenerationResult", "TextStream", "generate", "stream"]
