"""Products at real models' shapes, with block sizes to try: what scripts/tune_blocks.py measures.

Llama-3-8B (width 4096, 8 key/value heads of 128, feed-forward 14336), Qwen3-0.6B (1024, 16 heads of
128, 3072), SmolLM2-135M (576, 1536), and the experts of Qwen3-30B-A3B (128 of 768, 8 a token, width
2048).  One case a class of rows (infer.ops.matmul_sizes).
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from infer.ops.matmul_sizes import CLASSES, fields_of, key_of
from infer.pallas.grouped_matmul import GroupedMatmulBlocks, grouped_matmul
from infer.pallas.quantized_matmul import QuantizedMatmulBlocks, quantized_matmul
from infer.pallas.scaled_matmul import ScaledMatmulBlocks, scaled_matmul
from tests.cases.kernels import KernelCase, Tuning
from tests.cases.kernels import grouped_matmul as grouped
from tests.cases.kernels import quantized_matmul as quantized
from tests.cases.kernels import scaled_matmul as scaled

LLAMA_3_8B = ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336))
QWEN3_0_6B = ((2048, 1024), (1024, 2048), (3072, 1024), (1024, 3072))
SMOLLM2_135M = ((576, 576), (192, 576), (1536, 576), (576, 1536))
QWEN3_30B_A3B = ((128, 768, 2048), (128, 2048, 768))
_LARGE = ((14336, 4096), (4096, 14336))

_FEW, _MORE, _MANY = CLASSES


def _candidates(
    make: Callable[..., Any], outs: Iterable[int], rows: Iterable[int], **others: Iterable[int]
) -> tuple[Any, ...]:
    """Return sizes of every combination, with warps and stages that suit a tile."""
    found = []
    for out, row, *more in itertools.product(outs, rows, *others.values()):
        for warps, stages in ((4, 2), (4, 4), (8, 3)) if out * row >= 1024 else ((4, 2), (4, 4)):
            given = dict(zip(others, more, strict=True))
            sizes = make(block_out=out, block_rows=row, num_warps=warps, num_stages=stages, **given)
            found.append(sizes)
    return tuple(found)


def _case(
    kernel: str,
    words: str,
    rows: int,
    make: Callable[[Array], tuple[Any, ...]],
    run: Callable[..., Callable[..., Array]],
    key: Callable[[tuple[Any, ...]], str],
    sizes: tuple[Any, ...],
    flops: float,
) -> KernelCase:
    """Return a case; `run(sizes)` is the kernel with them, None its own choice."""
    given = jax.eval_shape(make, jax.random.key(0))
    num_bytes = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(given))
    return KernelCase(
        kernel=kernel,
        form="triton",
        shape=words,
        make=make,
        run=run(None),
        reference=run(None),
        names=(kernel,),
        flops=flops,
        bytes=float(num_bytes),
        tuning=Tuning(key=key(given), sizes=sizes, run=run, fields=fields_of(kernel, rows)),
    )


def _quantized(
    model: str, name: str, rows: int, shape: tuple[int, int], dtype: str = "bfloat16"
) -> KernelCase:
    out, width = shape

    def make(key: Array) -> tuple[Any, ...]:
        one, two = jax.random.split(key)
        return jax.random.normal(one, (rows, width), dtype), quantized.packed(name, out, width, two)

    if rows <= _FEW:
        sizes = _candidates(QuantizedMatmulBlocks, (32, 64, 128), (16,), splits=(4, 8, 16))
    else:
        sizes = _candidates(QuantizedMatmulBlocks, (32, 64, 128), (16, 32, 64))
    return _case(
        "quantized_matmul",
        f"{model} {name} {rows}x{width}x{out} {dtype}",
        rows,
        make,
        lambda blocks: lambda x, weight: quantized_matmul(x, weight, blocks=blocks),
        lambda given: key_of(given[1], rows, dtype),
        sizes,
        2.0 * rows * out * width,
    )


def _scaled(model: str, name: str, rows: int, shape: tuple[int, int]) -> KernelCase:
    out, width = shape
    (chips,) = {case.chips for case in scaled.CASES if case.shape.startswith(f"{name} 16x")}
    tiles = (16,) if rows <= _FEW else (16, 32, 64) if rows <= _MORE else (64, 128)
    case = _case(
        "scaled_matmul",
        f"{model} {name} {rows}x{width}x{out}",
        rows,
        lambda key: scaled.arrays(name, rows, out, width, key),
        lambda blocks: lambda x, scale, weight: scaled_matmul(x, scale, weight, blocks=blocks),
        lambda given: key_of(given[2], rows, given[0].dtype),
        _candidates(ScaledMatmulBlocks, (32, 64, 128), tiles),
        2.0 * rows * out * width,
    )
    return dataclasses.replace(case, chips=chips)


def _grouped(
    model: str, name: str, share: int, shape: tuple[int, int, int], dtype: str = "bfloat16"
) -> KernelCase:
    """All experts have the same number of rows; into the feed-forward it is gate and up."""
    experts, out, width = shape
    rows, gated = share * experts, out < width

    def make(key: Array) -> tuple[Any, ...]:
        keys = jax.random.split(key, 3)
        weights = [grouped.experts(name, shape, k) for k in keys[1:]]
        sizes = jnp.full((experts,), share, jnp.int32)
        return jax.random.normal(keys[0], (rows, width), dtype), sizes, *weights[: 1 + gated]

    def run(blocks: GroupedMatmulBlocks | None) -> Callable[..., Array]:
        def product(x: Array, sizes: Array, weight: Any, up: Any = None) -> Array:
            activation = None if up is None else "silu"
            return grouped_matmul(x, weight, sizes, up=up, activation=activation, blocks=blocks)

        return product

    return _case(
        "grouped_matmul",
        f"{model} {name} {rows}x{width} to {experts}x{out} {dtype}{' gated' if gated else ''}",
        share,
        make,
        run,
        lambda given: key_of(given[2], share, dtype, gated=gated),
        _candidates(GroupedMatmulBlocks, (32, 64, 128), (16,) if share <= _FEW else (32, 64, 128)),
        2.0 * rows * out * width * (1 + gated),
    )


CASES = (
    *(
        _quantized("llama-3-8b", name, rows, shape)
        for name in ("int4 g128", "int8 channel", "Q4_K")
        for rows in (_FEW, _MORE)
        for shape in LLAMA_3_8B
    ),
    *(_quantized("qwen3-0.6b", name, _FEW, s) for name in ("Q4_K", "Q8_0") for s in QWEN3_0_6B),
    *(_quantized("smollm2-135m", "Q8_0", _FEW, shape) for shape in SMOLLM2_135M),
    *(
        _scaled("llama-3-8b", name, rows, shape)
        for name in ("int8", "fp8 channel", "fp8 128x128")
        for rows in (_FEW, _MORE, _MANY)
        for shape in _LARGE
    ),
    *(
        _grouped("qwen3-30b-a3b", name, share, shape)
        for name in ("bfloat16", "Q4_K")
        for share in (_FEW, _MANY)
        for shape in QWEN3_30B_A3B
    ),
)


def _short(case: KernelCase) -> KernelCase:
    assert case.tuning
    return dataclasses.replace(
        case, tuning=dataclasses.replace(case.tuning, sizes=case.tuning.sizes[:2])
    )


# One tiny case a kernel and two of its candidates, for the interpreter.
SMOKE = tuple(
    map(
        _short,
        (
            _quantized("tiny", "int4 g32", 2, (24, 64), "float32"),
            _scaled("tiny", "int8", 2, (24, 160)),
            _grouped("tiny", "float32", 3, (4, 24, 64), "float32"),
        ),
    )
)
