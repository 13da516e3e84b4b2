"""What a model family has to say about itself: its configuration, and how files store its tensors.

Two kinds of file are described, GGUF and folders in transformers' layout.  Both give a ModelConfig
and a Layout; the code that reads tensors is one for all families.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from infer.config import ModelConfig

HfConfig = Mapping[str, Any]


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


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a kind of file stores the weights of a family.

    Attributes:
        layer_names: LayerParams field -> tensor name, with `{i}` for the layer.
        global_names: Params field -> tensor name.
        fused: tensor name -> the LayerParams fields whose rows it holds, one after the other; each
            of them has this name in `layer_names`.
        by_head: fused rows lie head by head instead (all fields of head 0, then of head 1).
        adjacent_pairs: rows of q and k are stored for rotation of neighbours, (2i, 2i + 1), and are
            put into the order of half-split pairs.
        transposed: fields stored as [in, out].
        norm_offset: added to every norm's gain, in float32 (Gemma computes with 1 + w).
        renamed: (regular expression, replacement) pairs, applied to the names in the file: older
            spellings of a tensor.
        ignored: regular expressions of names that may be there and mean nothing.
    """

    layer_names: Mapping[str, str]
    global_names: Mapping[str, str]
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    by_head: bool = False
    adjacent_pairs: bool = False
    transposed: frozenset[str] = frozenset()
    norm_offset: float = 0.0
    renamed: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family.

    Attributes:
        name: the architecture's name in GGUF where there is one, else transformers' model type.
        config: GGUF metadata -> ModelConfig; None where files of this family name another
            architecture.
        gguf: how a GGUF file stores the tensors; None likewise.
        model_types: transformers' `model_type`s that are this family.
        config_from_hf: (config.json, names of the tensors) -> ModelConfig.
        hf: how a folder of transformers stores the tensors.
    """

    name: str
    config: Callable[[Metadata], ModelConfig] | None = None
    gguf: Layout | None = None
    model_types: tuple[str, ...]
    config_from_hf: Callable[[HfConfig, Collection[str]], ModelConfig]
    hf: Layout
