"""Text to token ids and back: tokenizers from files, chat templates, incremental decoding.

Nothing here imports JAX; `tokenizers` and `jinja2` are imported when they are first needed.
"""

from infer.tokenizer.decoding import DecodeStream
from infer.tokenizer.tokenizer import Tokenizer

__all__ = ["DecodeStream", "Tokenizer"]
