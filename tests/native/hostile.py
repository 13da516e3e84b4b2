"""Calls straight at an FFI handler that no wrapper of ours would make.

    python -m tests.native.hostile OPERATION SEED COUNT     # without arguments: the operations

Each call is a good one with up to three things wrong.  A line goes out before each, so that the
last line of a process that died says what killed it.  The exit code is 1 if a wrong call ran.
"""

import ctypes
import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from infer import native
from infer.native.formats import E4M3, E5M2, FORMATS, LEVELS, planar_number

# Bytes of 16 rows of one block, and its width: gemm.h.
_BLOCKS = {
    "F32": (64, 1),
    "F16": (32, 1),
    "BF16": (32, 1),
    "Q4_0": (288, 32),
    "Q4_1": (320, 32),
    "Q5_0": (352, 32),
    "Q5_1": (384, 32),
    "Q8_0": (544, 32),
    "Q4_K": (2368, 256),
    "Q5_K": (2880, 256),
    "Q6_K": (3360, 256),
}
_INTS = [-1, 0, 3, 7, 2**31 - 1, 2**31, -(2**31), 2**62, -(2**63), 2**63 - 1]
_DTYPES = [np.int8, np.uint8, np.int32, np.float32, np.float16, jnp.bfloat16, np.bool_]


@dataclasses.dataclass
class Call:
    """The arguments of one `jax.ffi.ffi_call`; `wrong` says what was done to a good one."""

    name: str
    args: list[Any]
    results: list[tuple[tuple[int, ...], Any]]
    attrs: dict[str, Any]
    wrong: list[str] = dataclasses.field(default_factory=list)

    def run(self) -> list[np.ndarray]:
        """Run it, and return the results."""
        types = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in self.results]
        call = jax.ffi.ffi_call(self.name, types, vmap_method="sequential")
        return [np.asarray(x) for x in call(*self.args, **self.attrs)]

    def text(self) -> str:
        """Return it in a line."""
        shapes = [f"{x.dtype}{list(x.shape)}" for x in self.args]
        return f"{self.wrong} {shapes} {self.results} {self.attrs}"


def _f32(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


def _weight(
    rng: np.random.Generator, out: int, width: int, experts: int = 0
) -> tuple[np.ndarray, int]:
    """Return a packed weight of random bytes, or those of experts, and the number of its format."""
    lead = [experts] if experts else []
    if rng.integers(3) == 0:
        kind = int(rng.integers(11, 26))
        unit = 2 if kind >= LEVELS else 32
        span = unit * int(rng.integers(1, width // unit + 1))
        if kind < LEVELS and rng.integers(3) == 0:
            span = 16
        number = planar_number(kind, span, bool(rng.integers(2)))
        library = native.library()
        library.infer_native_panel_bytes.restype = ctypes.c_int64
        size = library.infer_native_panel_bytes(ctypes.c_int64(number), ctypes.c_int64(width))
        return rng.integers(0, 256, (*lead, -(-out // 16), size), np.uint8), number
    name = rng.choice([n for n, (_, block) in _BLOCKS.items() if width % block == 0])
    size, block = _BLOCKS[name]
    shape = (*lead, -(-out // 16), width // block * size)
    return rng.integers(0, 256, shape, np.uint8), FORMATS[name]


def linear(rng: np.random.Generator) -> Call:
    rows, width = int(rng.integers(0, 10)), int(rng.choice([32, 256, 288]))
    outs = [int(x) for x in rng.integers(1, 70, rng.integers(1, 4))]
    weights = [_weight(rng, out, width) for out in outs]
    has_bias = rng.integers(0, 2, len(outs))
    gain, residual = bool(rng.integers(2)), len(outs) == 1 and bool(rng.integers(2))
    floats = (FORMATS["F32"], FORMATS["F16"], FORMATS["BF16"], LEVELS, E4M3, E5M2)
    rounding = 0 if any(f & 255 in floats for _, f in weights) else int(rng.integers(3))
    return Call(
        "infer_linear",
        [
            _f32(rng, rows, width),
            *([_f32(rng, width)] if gain else []),
            *([np.float32(0.1)] if rounding == 2 else []),
            *(data for data, _ in weights),
            *(_f32(rng, out) for out, b in zip(outs, has_bias, strict=True) if b),
            *([_f32(rng, rows, outs[0])] if residual else []),
        ],
        [((rows, out), np.float32) for out in outs],
        {
            "formats": np.array([f for _, f in weights], np.int64),
            "has_bias": has_bias.astype(np.int64),
            "has_gain": gain,
            "has_residual": residual,
            "eps": np.float32(1e-5),
            "rounding": np.int64(rounding),
        },
    )


def gated_mlp(rng: np.random.Generator) -> Call:
    rows, width = int(rng.integers(0, 10)), int(rng.choice([32, 256]))
    hidden, residual = int(rng.choice([32, 96, 256])), bool(rng.integers(2))
    out = width if residual else int(rng.integers(1, 70))
    sizes = [(hidden, width), (hidden, width), (out, hidden)]
    weights = [_weight(rng, *size) for size in sizes]
    gain = [_f32(rng, width)] if rng.integers(2) else []
    return Call(
        "infer_gated_mlp",
        [_f32(rng, rows, width), *(data for data, _ in weights), *gain],
        [((rows, out), np.float32)],
        {
            "formats": np.array([f for _, f in weights], np.int64),
            "width": np.int64(hidden),
            "activation": np.int64(rng.integers(2)),
            "residual": residual,
            "eps": np.float32(1e-5),
        },
    )


def expert_mlp(rng: np.random.Generator) -> Call:
    tokens, width = int(rng.integers(0, 80)), int(rng.choice([32, 256]))
    experts, hidden, k = int(rng.integers(1, 6)), int(rng.choice([32, 96, 256])), rng.integers(1, 5)
    sizes = [(hidden, width), (hidden, width), (width, hidden)]
    weights = [_weight(rng, *size, experts) for size in sizes]
    return Call(
        "infer_expert_mlp",
        [
            _f32(rng, tokens, width),
            _ids(rng, tokens * int(k), experts).reshape(tokens, int(k)),
            _f32(rng, tokens, int(k)),
            *(data for data, _ in weights),
            *([_f32(rng, tokens, width)] if rng.integers(2) else []),
        ],
        [((tokens, width), np.float32)],
        {
            "formats": np.array([f for _, f in weights], np.int64),
            "width": np.int64(hidden),
            "activation": np.int64(rng.integers(2)),
        },
    )


def embed(rng: np.random.Generator) -> Call:
    rows, width, out = int(rng.integers(0, 10)), 256, int(rng.integers(1, 70))
    data, format = _weight(rng, out, width)
    return Call(
        "infer_embed",
        [_ids(rng, rows, out), data],
        [((rows, width), np.float32)],
        {"format": np.int64(format), "out": np.int64(out)},
    )


def paged_attention(rng: np.random.Generator) -> Call:
    batch, queries, heads, kv, width = _attention_sizes(rng)
    pages, size = int(rng.integers(0, 6)), int(rng.choice([1, 4, 16]))
    columns = int(rng.integers(0, 5))
    dtype = rng.choice(np.array([np.float32, np.float16, jnp.bfloat16, np.int8], object))
    pool = lambda: (10 * _f32(rng, pages, kv, size, width)).astype(dtype)
    scales = [_f32(rng, pages, kv, size) if dtype == np.int8 else _f32(rng, 0) for _ in range(2)]
    return Call(
        "infer_paged_attention",
        [
            _f32(rng, batch, queries, heads, width),
            pool(),
            pool(),
            *scales,
            _ids(rng, batch * columns, pages).reshape(batch, columns),
            _ids(rng, batch * queries, columns * size).reshape(batch, queries),
            _f32(rng, heads if rng.integers(2) else 0),
        ],
        [((batch, queries, heads, width), np.float32)],
        _attention_attrs(rng),
    )


def dense_attention(rng: np.random.Generator) -> Call:
    batch, queries, heads, kv, width = _attention_sizes(rng)
    keys = int(rng.integers(0, 20))
    dtype = rng.choice(np.array([np.float32, np.float16, jnp.bfloat16], object))
    return Call(
        "infer_dense_attention",
        [
            _f32(rng, batch, queries, heads, width),
            _f32(rng, batch, keys, kv, width).astype(dtype),
            _f32(rng, batch, keys, kv, width).astype(dtype),
            _f32(rng, heads if rng.integers(2) else 0),
        ],
        [((batch, queries, heads, width), np.float32)],
        _attention_attrs(rng),
    )


def rope_write(rng: np.random.Generator) -> Call:
    tokens, heads, kv, width = (int(rng.integers(0, high)) for high in (10, 5, 4, 40))
    pages, size, half = int(rng.integers(0, 5)), int(rng.integers(1, 6)), width // 2
    turned = int(rng.integers(0, half + 1))
    dtype = rng.choice(np.array([np.float32, np.float16, jnp.bfloat16], object))
    pool = (pages, kv, size, width)
    return Call(
        "infer_rope_write",
        [
            _f32(rng, tokens, heads, width),
            _f32(rng, tokens, kv, width),
            _f32(rng, tokens, kv, width),
            _f32(rng, tokens, turned),
            _f32(rng, tokens, turned),
            _ids(rng, tokens, pages),
            _ids(rng, tokens, 2**31 - 1),
            _f32(rng, *pool).astype(dtype),
            _f32(rng, *pool).astype(dtype),
        ],
        [((tokens, heads, width), np.float32), (pool, dtype), (pool, dtype)],
        {},
    )


def logsumexp(rng: np.random.Generator) -> Call:
    rows, vocab = int(rng.integers(0, 6)), int(rng.choice([1, 15, 16, 4097]))
    return Call("infer_logsumexp", [_logits(rng, rows, vocab)], [((rows,), np.float32)], {})


def sample(rng: np.random.Generator) -> Call:
    rows, vocab = int(rng.integers(0, 6)), int(rng.choice([1, 15, 16, 4097]))
    any_of = lambda *values: rng.choice(np.array(values, np.float32), rows)
    return Call(
        "infer_sample",
        [
            _logits(rng, rows, vocab),
            any_of(0, -1, 1e-30, 1, 1e30, np.inf, np.nan),
            any_of(-1, 0, 1e-9, 0.5, 1, 2, np.nan),
            any_of(-np.inf, -1, 0, 3, np.nan),
            _ids(rng, rows, vocab),
            rng.integers(0, 2**32, (rows, 2), np.uint32),
        ],
        [((rows,), np.int32)],
        {"greedy_below": np.float32(1e-5)},
    )


def _logits(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    odd = rng.choice(np.array([np.nan, np.inf, -np.inf, 1e38], np.float32), (rows, vocab))
    few = rng.random((rows, vocab)) < rng.choice([0, 0.1, 1])
    return np.where(few, odd, 3 * _f32(rng, rows, vocab))


def _attention_sizes(rng: np.random.Generator) -> tuple[int, ...]:
    kv = int(rng.integers(1, 4))
    batch, queries, width = int(rng.integers(0, 4)), int(rng.integers(0, 9)), rng.integers(1, 50)
    return batch, queries, kv * int(rng.integers(1, 4)), kv, int(width)


def _attention_attrs(rng: np.random.Generator) -> dict[str, Any]:
    return {
        "scale": np.float32(rng.choice([0.1, 0, -3, np.inf, np.nan])),
        "softcap": np.float32(rng.choice([0, 5.0, -5, np.nan])),
        "window": np.int64(rng.choice([1, 5, 2**40, 2**63 - 1])),
    }


def _ids(rng: np.random.Generator, count: int, limit: int) -> np.ndarray:
    """Return int32 ids, most in [0, limit), some far out of it: no handler may mind."""
    ids = rng.integers(0, max(1, limit), count)
    wild = rng.choice([-1, limit, -(2**31), 2**31 - 1], count)
    return np.where(rng.random(count) < 0.25, wild, ids).astype(np.int32)


# ---- What can be wrong --------------------------------------------------------------------------


def _other_shape(
    rng: np.random.Generator, shape: tuple[int, ...], others: Sequence[int]
) -> tuple[int, ...]:
    """Return a shape that is not the given one: an axis more, less, or of another size."""
    sizes, ways = list(shape), ["more axes"]
    if sizes:
        ways += ["fewer axes", "an axis"]
    way = rng.choice(ways)
    if way == "fewer axes":
        del sizes[rng.integers(len(sizes))]
    elif way == "more axes":
        sizes.insert(rng.integers(len(sizes) + 1), int(rng.integers(0, 3)))
    else:
        axis = rng.integers(len(sizes))
        sizes[axis] = int(rng.choice([x for x in others if x != sizes[axis]]))
    return tuple(sizes)


def _small(shape: tuple[int, ...]) -> bool:
    return int(np.prod(shape, dtype=np.int64)) <= 1 << 22


def argument_shape(rng: np.random.Generator, call: Call) -> str:
    i = int(rng.integers(len(call.args)))
    shape = _other_shape(rng, call.args[i].shape, (0, 1, 31, 33, 64, 1000))
    if _small(shape):  # and else as it was
        call.args[i] = np.zeros(shape, call.args[i].dtype)
    return f"argument {i} {shape}"


def argument_dtype(rng: np.random.Generator, call: Call) -> str:
    i = int(rng.integers(len(call.args)))
    dtype = rng.choice(np.array([d for d in _DTYPES if d != call.args[i].dtype], object))
    call.args[i] = np.zeros(call.args[i].shape, dtype)
    return f"argument {i} {np.dtype(dtype).name}"


def argument_count(rng: np.random.Generator, call: Call) -> str:
    if rng.integers(2):
        call.args.insert(int(rng.integers(len(call.args) + 1)), np.zeros((2, 3), np.float32))
        return "an argument more"
    if len(call.args) > 1:
        del call.args[rng.integers(len(call.args))]
    return "an argument less"


def result_shape(rng: np.random.Generator, call: Call) -> str:
    i = int(rng.integers(len(call.results)))
    # So many more rows that no panel of 16 has room for them.
    shape = _other_shape(rng, call.results[i][0], (0, 2000, 5000))
    if _small(shape):
        call.results[i] = (shape, call.results[i][1])
    return f"result {i} {shape}"


def result_dtype(rng: np.random.Generator, call: Call) -> str:
    i = int(rng.integers(len(call.results)))
    shape, old = call.results[i]
    dtype = rng.choice(np.array([d for d in _DTYPES if d != old], object))
    call.results[i] = (shape, dtype)
    return f"result {i} {np.dtype(dtype).name}"


def result_count(rng: np.random.Generator, call: Call) -> str:
    if rng.integers(2):
        call.results.append(((2, 3), np.float32))
        return "a result more"
    if len(call.results) > 1:
        call.results.pop()
    return "a result less"


def attribute(rng: np.random.Generator, call: Call) -> str:
    """An integer out of range, a list of another length, another type, or none at all."""
    if not call.attrs:
        return argument_shape(rng, call)
    name = str(rng.choice(list(call.attrs)))
    old = call.attrs[name]
    if rng.random() < 0.2:
        del call.attrs[name]
        return f"no {name}"
    if isinstance(old, np.ndarray):
        new = old.copy()
        if name == "has_bias" or rng.integers(2):
            new = np.append(old, np.int64(0)) if rng.integers(2) else old[:-1]
        else:
            new[rng.integers(len(new))] = rng.choice([x for x in _INTS if x not in (0, 3, 7)])
    elif isinstance(old, np.int64) and rng.random() < 0.8:
        new = np.int64(rng.choice([x for x in _INTS if x != old]))
        if name == "activation":
            new = np.int64(rng.choice([x for x in _INTS if x not in (0, 1)]))
        # Any other window is right, and so may be 3 or 7 rows in a panel of 16.
        if name in ("window", "out"):
            new = np.int64(rng.choice([x for x in _INTS if x < 0]))
    else:
        new = "text"
    call.attrs[name] = new
    return f"{name}={new}"


BUILD: dict[str, Callable[[np.random.Generator], Call]] = {
    f"infer_{f.__name__}": f
    for f in (
        linear,
        gated_mlp,
        expert_mlp,
        embed,
        paged_attention,
        dense_attention,
        rope_write,
        logsumexp,
        sample,
    )
}
WRONGS = [argument_shape, argument_dtype, argument_count, result_shape, result_dtype]
WRONGS += [result_count, attribute, attribute]


# Arguments of the operations whose last one, a norm's gain or a residual, can be left out.
_REQUIRED = {"infer_gated_mlp": 4, "infer_expert_mlp": 6}


# Operations whose first argument has as many columns as it likes.
_ANY_WIDTH = ("infer_logsumexp", "infer_sample")


def same_call(call: Call, good: Call) -> bool:
    """Return whether several wrongs have made a right."""
    args = list(good.args)
    if call.name in _ANY_WIDTH and call.args and call.args[0].ndim == 2:
        args[0] = np.zeros((len(args[0]), call.args[0].shape[1]), args[0].dtype)
    if len(call.args) == _REQUIRED.get(call.name):
        args = args[: len(call.args)]
    kinds = lambda arrays: [(x.shape, x.dtype) for x in arrays]
    types = lambda results: [(shape, np.dtype(dtype)) for shape, dtype in results]
    return (
        kinds(call.args) == kinds(args)
        and types(call.results) == types(good.results)
        and repr(call.attrs) == repr(good.attrs)
    )


def main(name: str, seed: int, count: int) -> int:
    """Make `count` calls; returns the process's exit code."""
    native.library()
    refused = ran = bad = 0
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        call = BUILD[name](rng)
        good = dataclasses.replace(call, args=list(call.args), results=list(call.results))
        good.attrs = dict(call.attrs)
        for _ in range(number % 4):
            call.wrong.append(WRONGS[rng.integers(len(WRONGS))](rng, call))
        print(number, call.text(), flush=True)
        try:
            call.run()
        except Exception as error:
            refused += 1
            if not call.wrong:
                bad += 1
                print(f"  a good call was refused: {error}")
            continue
        ran += 1
        if call.wrong and has_results(call) and not same_call(call, good):
            bad += 1
            print("  a wrong call ran")
    print(f"{ran} ran, {refused} refused, {bad} bad")
    return 1 if bad or not ran or not refused else 0


def has_results(call: Call) -> bool:
    """Return whether there is a result with a number in it: else XLA leaves the call out."""
    return any(0 not in shape for shape, _ in call.results)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print("\n".join(BUILD))
    else:
        sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
