"""Which products with packed weights run in one kernel, and which fall back to plain XLA: asked of
the ops themselves, for each format, number of rows and chip.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from infer.ops import choice
from infer.ops.experts import expert_mlp
from infer.ops.linear import linear
from infer.quant.blocks import DECODERS
from infer.quant.blocks import FORMATS as BLOCK_FORMATS
from infer.quant.methods import FP8, MX, NF4, NVFP4, RTN, LLMInt8
from infer.quant.qarray import QArray
from scripts.gate.compile_for_gpu import TARGETS
from tests.cases.kernels import CHIPS

# Of x (for experts: tokens), on both sides of the number at which `linear` changes its mind.
ROWS = (1, 64, 65)
_SIZE = 4096
_METHODS: dict[str, Any] = {
    "int8, a scale a channel": RTN(bits=8, group_size="channel"),
    **{f"int8, groups of {g}": RTN(bits=8, group_size=g) for g in (128, 32)},
    **{f"int4, groups of {g}": RTN(bits=4, group_size=g) for g in (128, 64, 32, 16)},
    "int4, groups of 128, zero points": RTN(bits=4, group_size=128, symmetric=False),
    **{f"int{b}, groups of 128": RTN(bits=b, group_size=128) for b in (6, 5, 3, 2)},
    "NF4": NF4(double=False),
    "NF4, scales quantised": NF4(),
    "FP4 (bitsandbytes)": NF4(levels="fp4"),
    "FP8 E4M3, a scale a channel": FP8(),
    "FP8 E4M3, 128 x 128": FP8(granularity="block"),
    "FP8 E5M2": FP8(code="e5m2"),
    "MXFP4, planar": MX(),
    "MXFP6": MX(code="e2m3"),
    "MXFP8": MX(code="e4m3"),
    "NVFP4, planar": NVFP4(),
    "W8A8 int8": RTN(bits=8, group_size="channel", activations="int8"),
    "W4A8 int4, groups of 128": RTN(bits=4, group_size=128, activations="int8"),
    "LLM.int8()": LLMInt8(),
    "FP8, a scale a channel, activations a token": FP8(activations="token"),
    "FP8, a scale a tensor, activations a token": FP8(granularity="tensor", activations="token"),
    "FP8, 128 x 128, activations 128": FP8(granularity="block", activations="block"),
}
_PLANAR_EXPERTS = tuple(
    name
    for name, method in _METHODS.items()
    if not method.format_for((4096, 4096)).activations
    and method.format_for((4096, 4096)).scale_dtype != "nested"
)
_BLOCKS = tuple(name for name in DECODERS if name not in ("F32", "F16", "BF16"))


def on(chip: str) -> Any:
    """Return a context in which programs are traced for a chip of the gate."""
    text = (TARGETS / f"{chip}.textproto").read_text()
    found = re.search(r'device_description_str: "([^"]+)"', text)
    assert found, chip
    device = jax.sharding.AbstractDevice(found[1], 1, "gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def _blocks(name: str, *shape: int) -> QArray:
    format = BLOCK_FORMATS[name]
    data = jax.ShapeDtypeStruct((*shape[:-1], format.row_bytes(shape[-1])), jnp.uint8)
    return QArray(data, format=format, shape=shape)  # type: ignore[arg-type]


def linear_choice(name: str, rows: int, chip: str, dtype: str = "bfloat16") -> choice.Choice:
    """Return what `linear` runs for `rows` of x with a weight of this format."""
    if name in _METHODS:
        floats = jax.ShapeDtypeStruct((_SIZE, _SIZE), jnp.float32)
        weight = jax.eval_shape(_METHODS[name].pack, floats)
    else:
        weight = _blocks(name, _SIZE, _SIZE)
    x = jax.ShapeDtypeStruct((rows, _SIZE), jnp.dtype(dtype))
    return _chosen(lambda x, w: linear(x, w), (x, weight), chip)


def expert_choice(name: str, rows: int, chip: str) -> choice.Choice:
    """Return what `expert_mlp` runs for `rows` tokens, 8 experts of 32."""
    experts, width, inner = 32, 2048, 768
    if name == "bfloat16":
        weight = lambda *shape: jax.ShapeDtypeStruct((experts, *shape), jnp.bfloat16)
    elif name in _METHODS:
        floats = lambda *shape: jax.ShapeDtypeStruct((experts, *shape), jnp.float32)
        weight = lambda *shape: jax.eval_shape(_METHODS[name].pack_experts, floats(*shape))
    else:
        weight = lambda *shape: _blocks(name, experts, *shape)
    x = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((rows, 8), jnp.int32)
    share = jax.ShapeDtypeStruct((rows, 8), jnp.bfloat16)
    weights = weight(inner, width), weight(inner, width), weight(width, inner)
    run = lambda *a: expert_mlp(*a, activation="silu")
    return _chosen(run, (x, ids, share, *weights), chip)


def _chosen(run: Callable[..., Any], args: Sequence[Any], chip: str) -> choice.Choice:
    with on(chip), choice.recording() as choices:
        jax.eval_shape(run, *args)
    (one,) = choices
    return one


def cell(choose: Callable[[int, str], choice.Choice], chip: str) -> str:
    """Return in words what runs on a chip: the kernels' forms with their rows; a dash is none."""
    forms = [(rows, choose(rows, chip).implementation) for rows in ROWS]
    words = []
    for form, group in itertools.groupby(forms, key=lambda pair: pair[1]):
        rows = [r for r, _ in group]
        last = "" if rows[-1] == ROWS[-1] else str(rows[-1])
        span = (
            "" if (rows[0], last) == (ROWS[0], "") else f" {rows[0]}{f'-{last}' if last else '+'}"
        )
        words += [f"{form}{span}"] if form != "xla" else []
    return ", ".join(words) or "-"


def table() -> str:
    """Return the table; formats of one kind that run alike share a line."""
    lines = [
        "Which products run in one kernel without a name given, by format, rows of x (bfloat16) "
        "and chip, as the ops choose for a weight of 4096 x 4096: the form of the kernel, and its "
        "rows if not all. The rest, and all where a dash stands, is plain XLA, which decodes a "
        "tile at a time.",
        "",
        "| format | " + " | ".join(chip.split("-")[0] for chip in CHIPS) + " |",
        "|---|" + "---|" * len(CHIPS),
    ]
    float32 = "int4, groups of 128"
    kinds: dict[str, tuple[Sequence[str], Callable[[str, int, str], choice.Choice]]] = {
        "planar": (tuple(_METHODS), linear_choice),
        "planar, x in float32": ((float32,), lambda *a: linear_choice(*a, dtype="float32")),
        "GGUF": (_BLOCKS, linear_choice),
        "experts": (("bfloat16", *_BLOCKS, *_PLANAR_EXPERTS), expert_choice),
    }
    for kind, (names, choose) in kinds.items():
        alike: dict[tuple[str, ...], list[str]] = {}
        for name in names:
            pick = lambda rows, chip, name=name, choose=choose: choose(name, rows, chip)
            alike.setdefault(tuple(cell(pick, chip) for chip in CHIPS), []).append(name)
        for cells, same in alike.items():
            lines.append(f"| {kind}: {'; '.join(same)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
