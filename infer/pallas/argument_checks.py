"""What the attention kernels ask of their arguments and block sizes, in clear words.

A kernel takes addresses from one array and counts from another: an array of another shape than the
rest would be read past its end on a GPU, and read wrongly, without a word, in the interpreter.
"""

import math
import operator
from typing import Any

import jax.numpy as jnp
from jax import Array

_FLOATS = ("bfloat16", "float16", "float32")


def check_shapes(op: str, **arrays: tuple[Array | None, str]) -> None:
    """Check that arrays have the axes that their letters say, each letter of one size everywhere.

    Args:
        op: the op's name, for messages.
        arrays: an array (or None: not given) and its axes: letters or numbers, "B T N H".

    Raises:
        ValueError: another rank, another size than the letter has in an earlier array, or none.
    """
    sizes: dict[str, tuple[int, str]] = {}  # letter -> its size, and the array that said so
    for name, (array, letters) in arrays.items():
        if array is None:
            continue
        axes, key = letters.split(), letters.replace(" ", ", ")
        came = f"{op}: {name} has the shape {list(array.shape)}"
        if len(axes) != array.ndim:
            raise ValueError(f"{came}, {array.ndim} axes; give it {len(axes)}: [{key}]")
        for axis, size in zip(axes, array.shape, strict=True):
            if axis.isdigit():
                want, source = int(axis), "always"
            else:
                want, source = sizes.setdefault(axis, (size, f"as in {name}"))
            if size != want:
                raise ValueError(
                    f"{came}, not [{key}] with {axis} = {want} ({source}); give arrays that "
                    "belong together"
                )
            if not size:
                raise ValueError(
                    f"{came}, [{key}] with {axis} = 0: an empty axis; leave the call out"
                )


def check_dtypes(
    op: str, *, q: Array, integers: dict[str, Array | None], floats: dict[str, Array | None]
) -> None:
    """Check that queries and `floats` are floating, and `integers` are integers.

    Raises:
        ValueError: a dtype of another kind.
        NotImplementedError: queries of a width of float that kernels do not multiply.
    """
    kinds = (
        ({"q": q} | floats, jnp.floating, "floating"),
        (integers, jnp.integer, "an integer"),
    )
    for arrays, kind, word in kinds:
        for name, array in arrays.items():
            if array is not None and not jnp.issubdtype(array.dtype, kind):
                raise ValueError(f"{op}: {name} is {array.dtype}; its dtype must be {word} one")
    if str(q.dtype) not in _FLOATS:
        raise NotImplementedError(
            f"{op} in Triton: q {list(q.shape)} of {q.dtype}; it takes {', '.join(_FLOATS)}"
        )


def check_numbers(
    op: str, scale: Any, window: Any = None, softcap: Any = None
) -> tuple[float, int | None, float | None]:
    """Return scale, window and softcap as Python numbers, which they are in the program.

    Raises:
        ValueError: one that is traced, or out of its range.
    """
    scale = _python(op, "scale", scale, float)
    if not (scale > 0 and math.isfinite(scale)):
        raise ValueError(
            f"{op}: scale is {scale}; use a finite number above 0, commonly 1 / sqrt(H)"
        )
    if window is not None:
        window = _python(op, "window", window, operator.index)
        if window < 1:
            raise ValueError(
                f"{op}: window is {window}; it counts the query's own key, so use 1 or more, or "
                "None"
            )
    if softcap is not None:
        softcap = _python(op, "softcap", softcap, float)
        if not (softcap > 0 and math.isfinite(softcap)):
            raise ValueError(
                f"{op}: softcap is {softcap}; use a finite number above 0, or None for no cap"
            )
    return scale, window, softcap


def _python(op: str, name: str, value: Any, convert: Any) -> Any:
    try:
        return convert(value)
    except (TypeError, ValueError) as error:  # of a tracer: a TypeError
        kind = "integer" if convert is operator.index else "number"
        raise ValueError(
            f"{op}: {name} must be a Python {kind}, not {type(value).__name__} {value}; it is a "
            "constant of the program: close over it, or make it a static argument of jit"
        ) from error


def as_int32(x: Array) -> Array:
    """Return integers in the kernels' 32 bits; what does not fit stays out of range."""
    info = jnp.iinfo(x.dtype)
    if info.max > 2**31 - 1:
        x = jnp.clip(x, max(info.min, -1), 2**31 - 1)
    return x.astype(jnp.int32)


def check_blocks(blocks: Any, *tiles: str) -> None:
    """Check what Triton asks of a dataclass of block sizes; None is a size that the op chooses.

    Args:
        blocks: the sizes.
        tiles: fields that are sides of tiles.

    Raises:
        ValueError: a size that Triton does not compile, or that the kernel's loop does not take.
    """
    for name in tiles:
        size = getattr(blocks, name)
        if size is not None and (size < 16 or size & (size - 1)):
            raise ValueError(f"{name} is {size}; use a power of two, 16 or more")
    for name in ("num_warps", "merge_warps"):
        warps = getattr(blocks, name, None)
        if warps is not None and warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"{name} is {warps}; use 1, 2, 4, 8 or 16")
    if blocks.num_stages < 1:
        raise ValueError(f"num_stages is {blocks.num_stages}; use 1 (no pipeline) or more")
    split = getattr(blocks, "split_keys", blocks.block_keys)
    if split < 1 or split % blocks.block_keys:
        raise ValueError(
            f"split_keys {split} is not a multiple of block_keys {blocks.block_keys}; use one "
            "above 0"
        )
