"""From a checkpoint to `Params`: read, rename, reorder, dequantise or keep packed, place."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from infer.backend import check_memory
from infer.config import ModelConfig
from infer.errors import WeightFormatError
from infer.models.family import Family
from infer.models.params import LayerParams, Params, expected_shapes
from infer.models.registry import family_of
from infer.quant.blocks import FORMATS
from infer.quant.qarray import QArray
from infer.weights.gguf import GGUFFile, rope_row_order

# Called with (bytes done, bytes in all) as tensors are read.
Progress = Callable[[int, int], None]

_DIVISORS = "rope_freqs.weight"
# Types that are plain numbers: they become float arrays even where quantised matrices stay packed.
_PLAIN = ("F32", "F16", "BF16")
# Room beside the weights for a small cache and the temporaries of a step, as a share of the
# weights.
_HEADROOM = 0.15


def load_gguf(
    path: str | Path,
    *,
    dtype: DTypeLike = jnp.float32,
    packed: bool = False,
    progress: Progress | None = None,
) -> Params:
    """Return the weights of a GGUF file.

    Args:
        path: of the file.
        dtype: of activations, norms and (unless packed) matrices.
        packed: keep quantised matrices in the file's own blocks; they are decoded inside the
            program.
        progress: called with (bytes done, bytes in all).

    Raises:
        WeightFormatError: the file is broken, or tensors are missing, stray or misshapen (all
        listed in one error). ConfigError: the architecture, or something it asks for, is not
        supported. CapacityError: the weights do not fit in memory; said before anything is loaded.
    """
    dtype = jnp.dtype(dtype)
    with GGUFFile.open(path) as file:
        family = family_of(file.meta_str("general.architecture"))
        divisors: tuple[float, ...] = ()
        if _DIVISORS in file.tensors:
            divisors = tuple(file.array(_DIVISORS, np.float32).reshape(-1).tolist())
        config = family.config(file, divisors)
        names = tensor_names(family, config)
        _check_tensors(file, names, config)
        _check_memory(file, names, dtype, packed)
        return _read(file, family, config, names, dtype, packed, progress)


def tensor_names(family: Family, config: ModelConfig) -> Params:
    """Return a Params whose leaves are the names of the tensors that belong there."""
    shapes = expected_shapes(config)
    present = lambda record, names: {
        field: name for field, name in names.items() if getattr(record, field) is not None
    }
    layers = tuple(
        LayerParams(
            **{f.name: None for f in dataclasses.fields(LayerParams)}
            | {
                field: name.format(i=i)
                for field, name in present(shape, family.layer_names).items()
            }
        )
        for i, shape in enumerate(shapes.layers)
    )
    return Params(**present(shapes, family.global_names), layers=layers, config=config)


def _slots(names: Params) -> dict[str, tuple[int, ...]]:
    """Return {tensor name: shape} of everything the model needs."""
    shapes = expected_shapes(names.config)
    wanted = {
        name: getattr(shapes, field)
        for field in ("embed", "final_norm", "lm_head")
        if (name := getattr(names, field)) is not None
    }
    for layer, shape in zip(names.layers, shapes.layers, strict=True):
        for f in dataclasses.fields(LayerParams):
            if (name := getattr(layer, f.name)) is not None:
                wanted[name] = getattr(shape, f.name)
    return wanted


def _check_tensors(file: GGUFFile, names: Params, config: ModelConfig) -> None:
    wanted = _slots(names)
    problems = []
    for name, shape in wanted.items():
        info = file.tensors.get(name)
        if info is None:
            problems.append(f"{name} is missing")
        elif tuple(info.shape) != shape:
            problems.append(f"{name} is {list(info.shape)}, must be {list(shape)}")
        elif info.type_name not in FORMATS and info.type_name not in _PLAIN:
            problems.append(f"{name} is {info.type_name}, which this version does not read")
    problems += [
        f"{name} has no place in a {config.family} model"
        for name in file.tensors
        if name not in wanted and name != _DIVISORS
    ]
    if problems:
        shown = "; ".join(problems[:20]) + (
            f"; and {len(problems) - 20} more" if len(problems) > 20 else ""
        )
        raise WeightFormatError(f"{file.path}: {shown}")


def _stays_packed(type_name: str, packed: bool) -> bool:
    return packed and type_name not in _PLAIN


def _check_memory(file: GGUFFile, names: Params, dtype: jnp.dtype, packed: bool) -> None:
    weights = 0
    for name, shape in _slots(names).items():
        info = file.tensors[name]
        keep = _stays_packed(info.type_name, packed)
        weights += info.nbytes if keep else int(np.prod(shape)) * jnp.dtype(dtype).itemsize
    way_out = (
        "free memory or take a smaller model" if packed else "packed=True keeps the file's own size"
    )
    form = "packed weights" if packed else jnp.dtype(dtype).name
    check_memory(f"{file.path} as {form}", int(weights * (1 + _HEADROOM)), way_out)


def _read(
    file: GGUFFile,
    family: Family,
    config: ModelConfig,
    names: Params,
    dtype: jnp.dtype,
    packed: bool,
    progress: Progress | None,
) -> Params:
    total = sum(file.tensors[name].nbytes for name in _slots(names))
    done = 0

    def read(name: str, heads: int = 0) -> jnp.ndarray | QArray:
        nonlocal done
        info = file.tensors[name]
        order = None
        if family.permuted_rope and heads:
            order = rope_row_order(heads, config.head_dim)
        if _stays_packed(info.type_name, packed):
            raw = file.raw(name)
            data = jnp.asarray(raw if order is None else raw[order])
            leaf = QArray.create(data, FORMATS[info.type_name], tuple(info.shape))
        else:
            values = file.array(name, np.float32)
            leaf = jnp.asarray(values if order is None else values[order]).astype(dtype)
        done += info.nbytes
        if progress is not None:
            progress(done, total)
        return leaf

    heads_of = {
        "q": config.num_heads,
        "k": config.num_kv_heads,
        "q_bias": config.num_heads,
        "k_bias": config.num_kv_heads,
    }
    layers = tuple(
        LayerParams(
            **{
                f.name: None
                if (name := getattr(layer, f.name)) is None
                else read(name, heads_of.get(f.name, 0))
                for f in dataclasses.fields(LayerParams)
            }
        )
        for layer in names.layers
    )
    return Params(
        embed=read(names.embed),
        layers=layers,
        final_norm=read(names.final_norm),
        lm_head=None if names.lm_head is None else read(names.lm_head),
        config=config,
    )
