"""Native attention: against the XLA form, by hand, bit for bit, and with poisoned memory."""

import concurrent.futures
import functools
import hashlib
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer import native
from infer.cache.pool import QuantizedPool
from infer.native.paged_attention import dense_attention, paged_attention
from infer.ops import attention_xla
from infer.quant.kv import KV_FORMATS, dequantize_kv, quantize_kv
from tests.tolerances import tolerance

OPTIONS = ("scale", "window", "softcap")
NATIVE = jax.jit(paged_attention, static_argnames=OPTIONS)
XLA = jax.jit(attention_xla.paged_attention, static_argnames=OPTIONS)


def sequence(length: int, heads: int, kv: int, width: int, seed: int = 0):
    """Return q, k, v [length, heads, width] of one sequence."""
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal((length, n, width), np.float32) for n in (heads, kv, kv))


def paged(sequences, page_size: int, *, dtype="float32", seed: int = 1, empty: int | None = None):
    """Return pools that hold the keys and values of `sequences` in a scattered order, NaN in all
    memory that belongs to nobody, and the table.
    """
    pages = [-(-len(k) // page_size) for _, k, _ in sequences]
    kv, width = sequences[0][1].shape[1:]
    num_pages = sum(pages) + 3
    order = list(np.random.default_rng(seed).permutation(num_pages - 1))
    pools = np.full((2, num_pages, kv, page_size, width), np.nan, np.float32)
    table = np.full((len(sequences), max(pages) + 1), num_pages if empty is None else empty)
    for row, (_, k, v) in enumerate(sequences):
        for j in range(len(k)):
            if j % page_size == 0:
                table[row, j // page_size] = order.pop()
            pools[:, table[row, j // page_size], :, j % page_size] = k[j], v[j]
    return *(jnp.asarray(x, dtype) for x in pools), jnp.asarray(table, jnp.int32)


def definition(q, k, v, first, scale, window, softcap, sinks):
    """Attention of the queries from `first` on, in float64, from the definition."""
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    out = np.zeros(q[first:].shape)
    for i in range(first, len(q)):
        keys = slice(0 if window is None else max(0, i - window + 1), i + 1)
        for n in range(heads):
            s = scale * (k[keys, n // group].astype(np.float64) @ q[i, n].astype(np.float64))
            s = s if softcap is None else softcap * np.tanh(s / softcap)
            m = s.max() if sinks is None else max(s.max(), sinks[n])
            w = np.exp(s - m)
            total = w.sum() + (0 if sinks is None else np.exp(sinks[n] - m))
            out[i - first, n] = w @ v[keys, n // group] / total
    return out


SHAPES = [
    # heads, kv, width, page_size, lengths
    (4, 4, 64, 16, (150, 1, 16)),
    (6, 2, 80, 5, (129, 128, 3)),
    (8, 1, 128, 16, (40, 260, 17)),
    (4, 1, 256, 1, (20, 131, 2)),
    (3, 1, 8, 5, (33, 5, 300)),
    (9, 3, 24, 16, (70, 2, 257)),
    (16, 2, 40, 5, (10, 140, 1)),
    (50, 1, 16, 16, (30, 2)),
    (5, 5, 3, 4, (9, 20)),
]


@pytest.mark.parametrize(("heads", "kv", "width", "page_size", "lengths"), SHAPES)
@pytest.mark.parametrize(
    ("window", "softcap", "sink"), [(None, None, False), (7, None, True), (133, 2.0, False)]
)
def test_is_the_definition(heads, kv, width, page_size, lengths, window, softcap, sink) -> None:
    """Decoding, chunks with padding and whole prompts, rows of different lengths in one batch."""
    sequences = [sequence(n, heads, kv, width, seed=n) for n in lengths]
    k_pages, v_pages, table = paged(sequences, page_size)
    scale = width**-0.5
    sinks = np.linspace(-2, 3, heads, dtype=np.float32) if sink else None
    for chunk in (1, 6, max(lengths)):
        q = np.full((len(lengths), chunk, heads, width), 7, np.float32)
        positions = np.full((len(lengths), chunk), -1, np.int32)
        want = np.zeros(q.shape)
        for row, (qs, k, v) in enumerate(sequences):
            first = max(0, len(qs) - chunk)
            count = len(qs) - first
            q[row, :count] = qs[first:]
            positions[row, :count] = np.arange(first, len(qs))
            want[row, :count] = definition(qs, k, v, first, scale, window, softcap, sinks)
        y = NATIVE(
            jnp.asarray(q),
            k_pages,
            v_pages,
            table,
            jnp.asarray(positions),
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=None if sinks is None else jnp.asarray(sinks),
        )
        np.testing.assert_allclose(y, want, **tolerance("float32", 64))
        assert not np.asarray(y)[positions < 0].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("width", [64, 72])
def test_equals_the_xla_form(dtype, width) -> None:
    sequences = [sequence(n, 6, 2, width, seed=n) for n in (150, 97)]
    k_pages, v_pages, table = paged(sequences, 16, dtype=dtype)
    for first in (96, 60):
        q = jnp.asarray(np.stack([s[0][first:97] for s in sequences]))
        positions = jnp.broadcast_to(jnp.arange(first, 97, dtype=jnp.int32), q.shape[:2])
        args = (q, k_pages, v_pages, table, positions)
        for options in ({}, {"window": 20, "softcap": 3.0}):
            got, want = (f(*args, scale=0.2, **options) for f in (NATIVE, XLA))
            np.testing.assert_allclose(got, want, **tolerance("float32", 64))


def quantized(pools, kv_format: str):
    """Return data and scales of pools; memory of nobody has any numbers and scales of NaN."""
    data, scales = zip(*(quantize_kv(jnp.nan_to_num(x), kv_format) for x in pools), strict=True)
    scales = [
        jnp.where(jnp.isnan(p[..., 0]), jnp.nan, s) for p, s in zip(pools, scales, strict=True)
    ]
    return data, dict(zip(("k_scales", "v_scales"), scales, strict=True))


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize(
    ("heads", "kv", "width"), [(6, 2, 64), (9, 3, 64), (6, 2, 40), (8, 1, 256), (2, 1, 18)]
)
def test_quantised_pools_are_their_numbers_times_a_scale(kv_format, heads, kv, width) -> None:
    """Few rows and many, whole lanes and widths of none; against the XLA form and float32 pools."""
    sequences = [sequence(n, heads, kv, width, seed=n) for n in (150, 97)]
    *pools, table = paged(sequences, 5)
    data, scales = quantized(pools, kv_format)
    products = [dequantize_kv(d, s) for d, s in zip(data, scales.values(), strict=True)]
    xla = [QuantizedPool(d, s) for d, s in zip(data, scales.values(), strict=True)]
    close = tolerance("float32", max(64, width))
    sinks = jnp.linspace(-1.0, 2.0, heads, dtype=jnp.float32)
    for first in (96, 90, 40):
        q = jnp.asarray(np.stack([s[0][first:97] for s in sequences]))
        positions = jnp.broadcast_to(jnp.arange(first, 97, dtype=jnp.int32), q.shape[:2])
        for options in ({}, {"window": 50, "softcap": 3.0, "sinks": sinks}):
            got = NATIVE(q, *data, table, positions, scale=width**-0.5, **scales, **options)
            want = NATIVE(q, *products, table, positions, scale=width**-0.5, **options)
            np.testing.assert_allclose(got, want, **close)
            want = XLA(q, *xla, table, positions, scale=width**-0.5, **options)
            np.testing.assert_allclose(got, want, **close)


def test_queries_in_bfloat16() -> None:
    one = sequence(20, 4, 2, 16)
    k_pages, v_pages, table = paged([one], 5, dtype="bfloat16")
    q = jnp.asarray(one[0][None], jnp.bfloat16)
    args = (q, k_pages, v_pages, table, jnp.arange(20, dtype=jnp.int32)[None])
    got, want = (f(*args, scale=0.25) for f in (NATIVE, XLA))
    assert got.dtype == jnp.bfloat16
    f32 = lambda x: np.asarray(x, np.float32)
    np.testing.assert_allclose(f32(got), f32(want), **tolerance("bfloat16", 8))


def test_a_window_of_three_of_seven_tokens() -> None:
    """Case M06: keys that score alike and one-hot values show who is seen."""
    k = np.zeros((7, 1, 8), np.float32)
    v = np.eye(8, dtype=np.float32)[:7, None]
    k_pages, v_pages, table = paged([(k, k, v)], 2)
    q = jnp.zeros((1, 7, 1, 8))
    y = NATIVE(
        q, k_pages, v_pages, table, jnp.arange(7, dtype=jnp.int32)[None], scale=1.0, window=3
    )
    seen = np.asarray(y[0, :, 0] > 0).sum(1)
    assert seen.tolist() == [1, 2, 3, 3, 3, 3, 3]
    np.testing.assert_allclose(y[0, 6, 0], np.asarray([0, 0, 0, 0, 1, 1, 1, 0]) / 3, rtol=1e-6)


# Case M11: (scores, sink, values) -> output, by hand.
@pytest.mark.parametrize(
    ("scores", "sink", "values", "want"),
    [
        ([0.0, 0.0], 0.0, [1.0, 1.0], 0.66666667),
        ([1.0, 2.0, 3.0], 2.5, [1.0, 2.0, 4.0], 2.308854),
        ([0.0], -np.inf, [5.0], 5.0),
    ],
)
def test_a_sink_joins_the_denominator_only_unscaled(scores, sink, values, want) -> None:
    column = lambda x: np.asarray(x, np.float32)[:, None, None]
    q, k, v = column([2.0] * len(scores)), column(scores), column(values)
    sinks = jnp.asarray([sink], jnp.float32)
    for page_size in (1, 2):
        k_pages, v_pages, table = paged([(q, k, v), (q[:0], k[:0], v[:0])], page_size)
        # A row that sees no key beside it.
        positions = jnp.asarray([[len(scores) - 1], [-1]], jnp.int32)
        y = NATIVE(
            jnp.full((2, 1, 1, 1), 2.0),
            k_pages,
            v_pages,
            table,
            positions,
            scale=0.5,
            sinks=sinks,
        )
        np.testing.assert_allclose(y[:, 0, 0, 0], [want, 0], rtol=1e-6)
    dense = dense_attention(*(jnp.asarray(x[None]) for x in (q, k, v)), scale=0.5, sinks=sinks)
    np.testing.assert_allclose(dense[0, -1, 0, 0], want, rtol=1e-6)


@pytest.mark.parametrize("scores", ["equal", "rising", "falling", "huge"])
def test_any_order_of_scores(scores) -> None:
    """The maximum lies in the first split, in the last, or everywhere."""
    q, k, v = sequence(400, 1, 1, 8)
    ramp = np.linspace(-40, 40, 400, dtype=np.float32)
    k[:] = 0
    k[:, 0, 0] = {"equal": 0 * ramp, "rising": ramp, "falling": -ramp, "huge": 1e4 * ramp}[scores]
    q[:] = 1
    k_pages, v_pages, table = paged([(q, k, v)], 16)
    y = NATIVE(
        jnp.asarray(q[None]),
        k_pages,
        v_pages,
        table,
        jnp.arange(400, dtype=jnp.int32)[None],
        scale=1.0,
    )
    want = definition(q, k, v, 0, 1.0, None, None, None)
    np.testing.assert_allclose(y[0], want, **tolerance("float32", 64))


@pytest.mark.parametrize("empty", [-1, None, 2**31 - 1, -(2**31)])
def test_an_entry_without_a_page_is_never_read(empty) -> None:
    """Case X01: neither -1 nor P may reach another sequence's page; nor is what a window left."""
    one = sequence(300, 2, 1, 16)
    k_pages, v_pages, table = paged([one], 16, empty=empty)
    gone = np.asarray(table).copy()
    gone[0, : (300 - 20) // 16] = k_pages.shape[0] if empty is None else empty
    q, positions = jnp.asarray(one[0][None, 299:]), jnp.asarray([[299]], jnp.int32)
    got = NATIVE(q, k_pages, v_pages, jnp.asarray(gone), positions, scale=0.3, window=20)
    want = definition(*one, 299, 0.3, 20, None, None)
    np.testing.assert_allclose(got[0], want, **tolerance("float32", 64))
    # A hole among the visible keys counts as if its keys did not exist.
    hole = np.asarray(table).copy()
    hole[0, 3] = gone[0, 0]
    got = NATIVE(q, k_pages, v_pages, jnp.asarray(hole), positions, scale=0.3)
    kept = np.r_[0:48, 64:300]
    filled = (one[0][kept], one[1][kept], one[2][kept])
    want = definition(*filled, len(kept) - 1, 0.3, None, None, None)
    np.testing.assert_allclose(got[0], want, **tolerance("float32", 64))
    # A position past the table sees what the table has.
    far = jnp.asarray([[2**31 - 1]], jnp.int32)
    got = NATIVE(q, k_pages, v_pages, jnp.full_like(table, -1), far, scale=0.3)
    np.testing.assert_array_equal(got, 0)


def test_rows_without_keys() -> None:
    q = jnp.ones((2, 3, 2, 8))
    pool = jnp.full((1, 1, 4, 8), jnp.nan)
    table = jnp.zeros((2, 0), jnp.int32)
    positions = jnp.asarray([[0, 1, 2], [-1, -1, -1]], jnp.int32)
    np.testing.assert_array_equal(NATIVE(q, pool, pool, table, positions, scale=1.0), 0)
    # No window's key, no pages, no rows, no tokens.
    table = jnp.zeros((2, 1), jnp.int32)
    none = NATIVE(q, pool, pool, table, positions, scale=1.0, window=0)
    np.testing.assert_array_equal(none, 0)
    np.testing.assert_array_equal(NATIVE(q, pool[:0], pool[:0], table, positions, scale=1.0), 0)
    assert NATIVE(q[:0], pool, pool, table[:0], positions[:0], scale=1.0).shape == (0, 3, 2, 8)
    assert NATIVE(q[:, :0], pool, pool, table, positions[:, :0], scale=1.0).size == 0


@pytest.mark.parametrize(("window", "softcap", "sink"), [(None, None, False), (5, 2.0, True)])
def test_dense_attention_equals_the_xla_form(window, softcap, sink) -> None:
    rows = [sequence(140, 6, 2, 24, seed=s) for s in range(2)]
    q, k, v = (jnp.asarray(np.stack(x)) for x in zip(*rows, strict=True))
    options = dict(scale=0.2, window=window, softcap=softcap)
    options["sinks"] = jnp.linspace(-1.0, 2.0, 6, dtype=jnp.float32) if sink else None
    got = dense_attention(q, k, v, **options)
    np.testing.assert_allclose(
        got, attention_xla.dense_attention(q, k, v, **options), **tolerance("float32", 64)
    )
    # More keys than queries, and fewer.
    for keys in (150, 100):
        grown = [jnp.pad(x, ((0, 0), (0, 10), (0, 0), (0, 0)))[:, :keys] for x in (k, v)]
        np.testing.assert_array_equal(dense_attention(q, *grown, **options)[:, :100], got[:, :100])
    # Dense and paged keys give the same bits.
    k_pages, v_pages, table = paged(rows, 16)
    positions = jnp.broadcast_to(jnp.arange(140, dtype=jnp.int32), (2, 140))
    np.testing.assert_array_equal(
        paged_attention(q, k_pages, v_pages, table, positions, **options), got
    )


# ---- Bits ------------------------------------------------------------------------------------

BITS = [
    # heads, kv, width, page_size, length, options, dtype
    (9, 3, 64, 16, 400, {}, "float32"),
    (8, 1, 40, 5, 290, {"window": 37, "softcap": 2.0}, "bfloat16"),
    (4, 4, 80, 16, 150, {"window": 130}, "float16"),
    (9, 3, 64, 16, 290, {}, "int8"),
    (8, 1, 64, 5, 290, {"window": 37, "softcap": 2.0}, "int4"),
    (4, 2, 48, 16, 150, {"window": 130}, "float8_e4m3"),
    (6, 2, 40, 16, 150, {}, "int4"),
]


def bits(heads, kv, width, page_size, length, options, dtype) -> np.ndarray:
    """Return the outputs of a whole sequence, after checks that chunks and batches do not show."""
    one, other = (sequence(length, heads, kv, width, seed=s) for s in (0, 1))
    if dtype in KV_FORMATS:
        *pools, table = paged([one, other], page_size)
        (k_pages, v_pages), scales = quantized(pools, dtype)
    else:
        *pools, table = paged([one, other], page_size, dtype=dtype)
        (k_pages, v_pages), scales = pools, {}
    sinks = jnp.linspace(-1.0, 2.0, heads, dtype=jnp.float32)
    run = functools.partial(NATIVE, scale=0.3, sinks=sinks, **scales, **options)
    positions = np.arange(length, dtype=np.int32)
    whole = np.asarray(run(one[0][None], k_pages, v_pages, table[:1], positions[None])[0])
    for chunk in (1, 7, 64):
        for first in (0, min(120, length - chunk), length - chunk):
            at = slice(first, first + chunk)
            # Padded to a chunk, and beside another row.
            y = run(
                np.stack([other[0][at], one[0][at]]),
                k_pages,
                v_pages,
                table[::-1],
                np.stack([np.full(chunk, -1, np.int32), positions[at]]),
            )
            np.testing.assert_array_equal(y[1], whole[at])
            y = run(
                np.stack([one[0][at], other[0][at]]),
                k_pages,
                v_pages,
                table,
                np.stack([positions[at]] * 2),
            )
            np.testing.assert_array_equal(y[0], whole[at])
    return whole


def digest() -> str:
    """Return a digest of all bits."""
    return hashlib.sha256(b"".join(bits(*case).tobytes() for case in BITS)).hexdigest()


@pytest.mark.parametrize("case", BITS)
def test_a_tokens_bits_do_not_depend_on_its_chunk_or_batch(case) -> None:
    bits(*case)


def test_bits_do_not_depend_on_threads_or_instruction_set() -> None:
    code = "import tests.native.test_paged_attention as t; print(t.native.isa(), t.digest())"
    seen = {}
    for isa, threads in (("avx2", 1), ("avx2", 3), ("avx512", 2), ("avx512", 3)):
        env = {**os.environ, "INFER_NATIVE_ISA": isa, "INFER_NUM_THREADS": str(threads)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300
        )
        if isa == "avx512" and "INFER_NATIVE_ISA is avx512" in done.stderr:
            continue  # this CPU has none
        assert done.returncode == 0, done.stderr
        used, seen[isa, threads] = done.stdout.split()
        assert used == isa
    assert len(seen) >= 2 and set(seen.values()) == {digest()}


def test_concurrent_calls() -> None:
    """Callers on their own threads do not share scratch, and do not wait for each other."""
    cases = []
    for seed in range(4):
        one = sequence(260, 6, 2, 64, seed=seed)
        k_pages, v_pages, table = paged([one], 16)
        positions = jnp.arange(260, dtype=jnp.int32)[None]
        cases.append((jnp.asarray(one[0][None]), k_pages, v_pages, table, positions))
    want = [NATIVE(*case, scale=0.3) for case in cases]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            got = pool.map(lambda case: NATIVE(*case, scale=0.3), cases)
            for x, y in zip(got, want, strict=True):
                np.testing.assert_array_equal(x, y)
    # Independent calls in one program, which XLA may run at once.
    together = jax.jit(lambda cases: [paged_attention(*case, scale=0.3) for case in cases])
    for x, y in zip(together(cases), want, strict=True):
        np.testing.assert_array_equal(x, y)


# ---- Errors ----------------------------------------------------------------------------------


def _raw(q, k, v, k_scales, v_scales, table, positions, sinks):
    """The operation without the annotations of its Python side."""
    native.library()
    call = jax.ffi.ffi_call("infer_paged_attention", jax.ShapeDtypeStruct(q.shape, q.dtype))
    return call(
        q,
        k,
        v,
        k_scales,
        v_scales,
        table,
        positions,
        sinks,
        scale=np.float32(1),
        softcap=np.float32(0),
        window=np.int64(9),
    )


BAD = [
    (0, lambda q: q[0], "do not fit"),
    (0, lambda q: q[..., :8], "do not fit"),
    (0, lambda q: q[:, :, :3], "q has 3 heads, not a multiple of k's 2"),
    (0, lambda q: q.astype(jnp.bfloat16), "must be float32"),
    (1, lambda k: k[:2], "do not fit"),
    (1, lambda k: k.astype(jnp.float16), "both be float32, bfloat16, float16, int8"),
    (2, lambda v: v[..., :8], "do not fit"),
    (3, lambda _: jnp.zeros((5, 2, 4)), r"others none; pools \[5, 2, 4, 16\] have \[5, 2, 4\]"),
    (5, lambda table: table[:1], r"a row for each of q \[2, 3, 4, 16\]; it is \[1, 3\]"),
    (5, lambda table: table.astype(jnp.float32), "page table must be int32"),
    (6, lambda positions: positions[:, :2], "one for each token"),
    (7, lambda sinks: sinks[:3], r"sinks must be float32, one for each head.*\[3\]"),
]


@pytest.mark.parametrize(("index", "change", "message"), BAD)
def test_bad_operands_are_refused(index, change, message) -> None:
    pool = jnp.zeros((5, 2, 4, 16))
    ints = lambda *shape: jnp.zeros(shape, jnp.int32)
    none = jnp.zeros(0)
    args = [jnp.zeros((2, 3, 4, 16)), pool, pool, none, none, ints(2, 3), ints(2, 3), jnp.zeros(4)]
    jax.block_until_ready(_raw(*args))
    args[index] = change(args[index])
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(_raw(*args))


def test_pages_without_tokens_and_pools_without_heads_are_refused() -> None:
    ints, none = jnp.zeros((2, 3), jnp.int32), jnp.zeros(0)
    for shape, message in (((5, 2, 0, 16), "hold no token"), ((5, 0, 4, 16), "not a multiple")):
        pool = jnp.zeros(shape)
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.block_until_ready(
                _raw(jnp.zeros((2, 3, 4, 16)), pool, pool, none, none, ints, ints, none)
            )
    # Bytes of int4 are half as many as numbers.
    args = (jnp.zeros((2, 3, 4, 16)), *[jnp.zeros((5, 2, 4, 16), jnp.uint8)] * 2)
    with pytest.raises(jax.errors.JaxRuntimeError, match="do not fit"):
        jax.block_until_ready(_raw(*args, none, none, ints, ints, none))
    # Scales that quantised pools lack, and scales of another shape.
    pool, good = jnp.zeros((5, 2, 4, 16), jnp.int8), jnp.zeros((5, 2, 4))
    args = (jnp.zeros((2, 3, 4, 16)), pool, pool)
    jax.block_until_ready(_raw(*args, good, good, ints, ints, none))
    for scales in ((good, none), (none, good), (good[:4], good), (good.astype(jnp.int32), good)):
        with pytest.raises(jax.errors.JaxRuntimeError, match="quantised pools need float32 scales"):
            jax.block_until_ready(_raw(*args, *scales, ints, ints, none))


def test_bad_dense_operands_are_refused() -> None:
    native.library()
    q, k = jnp.zeros((2, 3, 4, 16)), jnp.zeros((2, 5, 2, 16))
    call = jax.ffi.ffi_call("infer_dense_attention", jax.ShapeDtypeStruct(q.shape, q.dtype))
    run = lambda *operands: jax.block_until_ready(
        call(*operands, scale=np.float32(1), softcap=np.float32(0), window=np.int64(9))
    )
    none = jnp.zeros(0)
    run(q, k, k, none)
    int8 = k.astype(jnp.int8)
    for operands, message in (
        ((q, k[:1], k, none), "do not fit"),
        ((q, k, k[:, :4], none), "do not fit"),
        ((q, k[..., :8], k[..., :8], none), "do not fit"),
        ((q, k[:, :, :0], k[:, :, :0], none), "not a multiple"),
        ((q, k, k, jnp.zeros(2)), "one for each head"),
        ((q, int8, int8, none), "cannot be quantised"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            run(*operands)
