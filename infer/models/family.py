"""What a model family has to say about itself: its configuration and the names of its tensors, in
GGUF files and in transformers' layout.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from infer.config import ModelConfig
from infer.models.checkpoint import Layout
from infer.models.rows import Names


@runtime_checkable
class Metadata(Protocol):
    """Typed access to a GGUF file; a missing key gives the default, or an error where there is
    none.
    """

    @property
    def metadata(self) -> Mapping[str, Any]: ...  # noqa: D102
    @property
    def tensors(self) -> Mapping[str, Any]: ...  # noqa: D102
    def array(self, name: str, dtype: Any = ...) -> np.ndarray: ...  # noqa: D102
    def meta_int(self, key: str, default: int = ...) -> int: ...  # noqa: D102
    def meta_float(self, key: str, default: float = ...) -> float: ...  # noqa: D102
    def meta_bool(self, key: str, default: bool = ...) -> bool: ...  # noqa: D102
    def meta_str(self, key: str, default: str = ...) -> str: ...  # noqa: D102
    def meta_strs(self, key: str, default: list[str] = ...) -> list[str]: ...  # noqa: D102


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family as its files describe it.

    Attributes:
        name: the architecture's name in GGUF; of a family without one of its own, transformers'
            model type.
        config: GGUF file -> ModelConfig; None: its GGUF files name another family's architecture.
        layer_names: LayerParams field -> tensor of a GGUF file, with `{i}` for the layer.
        global_names: Params field -> tensor of a GGUF file.
        hf: the same for checkpoints in transformers' layout; None: not read in that layout.
        own_keys: ModelConfig -> keys of a GGUF file beside those of `gguf_keys.common`.
        written_as: the other family whose architecture its GGUF files name; None: its own.
    """

    name: str
    config: Callable[[Metadata], ModelConfig] | None = None
    layer_names: Names = field(default_factory=dict)
    global_names: Names = field(default_factory=dict)
    hf: Layout | None = None
    own_keys: Callable[[ModelConfig], dict[str, Any]] = lambda config: {}
    written_as: str | None = None
