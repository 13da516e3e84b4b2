"""A loaded model: weights and tokenizer together, and `load` that makes one from a name or a
file.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from infer.config import ModelConfig
from infer.errors import ConfigError
from infer.generation import GenerationResult, TextStream, generate, stream
from infer.models.params import Params
from infer.sampling import SamplingParams
from infer.tokenizer import Tokenizer
from infer.weights import bundled
from infer.weights.gguf import GGUFFile
from infer.weights.load import Progress, load_gguf

_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Model:
    """What `load` returns.  `params` is all that the pure functions need; the rest is for
    people.
    """

    params: Params
    tokenizer: Tokenizer
    name: str
    path: Path

    @property
    def config(self) -> ModelConfig:
        """What the model is."""
        return self.params.config

    def generate(
        self, prompts: Sequence[Any] | str, sampling: Any = None, **options: Any
    ) -> GenerationResult:
        """Generate from every prompt with this model's tokenizer; takes `infer.generate`'s
        options.
        """
        return generate(
            self.params, prompts, tokenizer=self.tokenizer, sampling=sampling, **options
        )

    def stream(
        self, prompt: str | Sequence[int], sampling: SamplingParams | None = None, **options: Any
    ) -> TextStream:
        """Yield the text of one prompt's continuation as it grows."""
        return stream(self.params, prompt, tokenizer=self.tokenizer, sampling=sampling, **options)

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        sampling: SamplingParams | None = None,
        **options: Any,
    ) -> TextStream:
        """Yield the assistant's reply to `messages` as it grows, by the model's own chat
        template.
        """
        ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return self.stream(ids, sampling, **options)


def load(
    name: str | Path,
    *,
    dtype: DTypeLike | None = None,
    packed: bool = False,
    progress: Progress | None = None,
) -> Model:
    """Load a model.

    Args:
        name: a known name (`infer models` lists them; fetched when missing) or the path of a GGUF
            file.
        dtype: of activations and unpacked weights; None is float32 on a CPU and bfloat16 on a GPU.
        packed: keep quantised matrices as in the file: least memory, decoded inside the program.
        progress: called with (bytes done, bytes in all) while weights are read.

    Raises:
        ConfigError: an unknown name, dtype, or architecture.
        WeightFormatError: the file is broken or of a kind that is not read.
        CapacityError: the weights do not fit in memory.
    """
    path = resolve(name)
    if dtype is None:
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    params = load_gguf(path, dtype=_checked_dtype(dtype), packed=packed, progress=progress)
    with GGUFFile.open(path) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
    return Model(params=params, tokenizer=tokenizer, name=str(name), path=path)


def _checked_dtype(dtype: DTypeLike) -> Any:
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in _DTYPES:
        raise ConfigError(f"dtype is {name}; weights and activations can be {', '.join(_DTYPES)}")
    return jnp.dtype(name)


def resolve(name: str | Path) -> Path:
    """Return the file that `name` stands for; a known name that is missing is fetched."""
    if str(name) in bundled.known_models():
        return bundled.pull(str(name))
    path = Path(name).expanduser()
    if path.is_file():
        return path
    known = ", ".join(sorted(bundled.known_models()))
    raise ConfigError(
        f"{str(name)!r} is neither a known model ({known}) nor a file; give one of these or a "
        ".gguf path"
    )
