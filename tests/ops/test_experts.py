"""Routes against transformers; the plain form of the experts against float64 and transformers."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infer import native
from infer.native.repack import Packed, repack
from infer.ops import choice, experts
from infer.ops.experts import expert_mlp
from infer.ops.router import route
from infer.quant.methods import FP8, NVFP4, RTN
from infer.quant.qarray import QArray, dequantize
from tests.cases.experts import CASES, Case, inputs
from tests.native.weights import dense, random_experts, random_rows
from tests.tolerances import tolerance

GOLDEN = np.load(Path(__file__).parent.parent / "data" / "experts.npz")


def random_choices(tokens: int, num_experts: int, k: int) -> tuple[jax.Array, jax.Array]:
    """Return ids, distinct in a row, that leave the last expert empty if others suffice."""
    rng = np.random.default_rng(tokens)
    there = num_experts - (num_experts > k)
    ids = np.stack([rng.permutation(there)[:k] for _ in range(tokens)])
    return jnp.asarray(ids, jnp.int32), jnp.asarray(rng.random((tokens, k), np.float32))


def reference(x: Any, ids: Any, weights: Any, gate: Any, up: Any, down: Any) -> np.ndarray:
    """Return the sum in float64, with silu."""
    x, gate, up, down, weights = (np.asarray(a, np.float64) for a in (x, gate, up, down, weights))
    y = np.zeros_like(x)
    for t in range(len(x)):
        for e, weight in zip(np.asarray(ids)[t], weights[t], strict=True):
            g = gate[e] @ x[t]
            y[t] += weight * (down[e] @ (g / (1 + np.exp(-g)) * (up[e] @ x[t])))
    return y


def random_floats(num_experts: int, width: int = 32, hidden: int = 48) -> list[jax.Array]:
    """Return gate, up and down in float32."""
    shapes = [(num_experts, hidden, width)] * 2 + [(num_experts, width, hidden)]
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(s, np.float32) / 5) for s in shapes]


# ---- Routes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_routes_are_those_of_transformers(case: Case) -> None:
    arrays = inputs(case)
    logits = jnp.asarray(arrays["x"] @ arrays["router"].T)
    bias = jnp.asarray(arrays["bias"]) if case.has_bias else None
    ids, weights = map(np.asarray, route(logits, case.k, bias=bias, **case.route))
    order = np.argsort(ids, axis=-1)
    assert ids.dtype == np.int32 and weights.dtype == np.float32
    assert np.array_equal(np.take_along_axis(ids, order, -1), GOLDEN[f"{case.name}/ids"])
    np.testing.assert_allclose(
        np.take_along_axis(weights, order, -1),
        GOLDEN[f"{case.name}/weights"],
        **tolerance("float32", case.width),
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_experts_are_those_of_transformers(case: Case) -> None:
    if f"{case.name}/y" not in GOLDEN:
        assert case.family == "gpt_oss"  # its experts have biases and another gate
        return
    arrays = {name: jnp.asarray(a) for name, a in inputs(case).items()}
    y = expert_mlp(
        arrays["x"],
        jnp.asarray(GOLDEN[f"{case.name}/ids"]),
        jnp.asarray(GOLDEN[f"{case.name}/weights"]),
        *(arrays[name] for name in ("gate", "up", "down")),
        activation="silu",
    )
    want = GOLDEN[f"{case.name}/y"]
    atol = tolerance("float32", case.hidden)["atol"] * np.abs(want).max()
    np.testing.assert_allclose(y, want, rtol=0, atol=atol)


def test_routes_by_hand() -> None:
    third = np.log(np.array([[1, 3, 2, 2]], np.float32))
    of = lambda *args, **kwargs: [np.asarray(a)[0].tolist() for a in route(*args, **kwargs)]
    close = lambda got, ids, weights: (
        got[0] == ids and np.allclose(got[1], weights, rtol=1e-6, atol=0)
    )
    logits = jnp.asarray(third)
    assert close(of(logits, 2, kind="softmax"), [1, 2], [3 / 8, 2 / 8])
    assert close(of(logits, 2, kind="softmax", normalize=True), [1, 2], [3 / 5, 2 / 5])
    assert close(of(logits, 2, kind="topk_softmax", scale=2.0), [1, 2], [6 / 5, 4 / 5])
    # sigmoid(log n) = n / (n + 1): 1/2, 3/4, 2/3, 2/3.
    assert close(of(logits, 3, kind="sigmoid"), [1, 2, 3], [3 / 4, 2 / 3, 2 / 3])
    bias = jnp.asarray([1, 0, 0, 0], jnp.float32)
    assert close(of(logits, 2, kind="sigmoid", bias=bias), [0, 1], [1 / 2, 3 / 4])
    # Groups (1/2 + 3/4) and (2/3 + 2/3): the second has the larger sum, the first the larger best.
    groups = dict(num_groups=2, num_kept_groups=1)
    assert close(of(logits, 2, kind="sigmoid", **groups), [2, 3], [2 / 3, 2 / 3])
    assert close(of(logits, 2, kind="softmax", **groups), [1, 0], [3 / 8, 1 / 8])


@pytest.mark.parametrize("kind", ["softmax", "topk_softmax", "sigmoid"])
def test_of_equal_scores_the_lower_id_is_better(kind: str) -> None:
    logits = jnp.asarray([[0.0, 1, -0.0, 1, 0, 1], [-0.0, 0, 0, -0.0, 0, 0]], jnp.float32)
    ids, _ = route(logits, 4, kind=kind)
    assert ids.tolist() == [[1, 3, 5, 0], [0, 1, 2, 3]]
    groups, _ = route(logits[1:], 2, kind=kind, num_groups=3, num_kept_groups=1)
    assert groups.tolist() == [[0, 1]]


@pytest.mark.parametrize("kind", ["softmax", "topk_softmax", "sigmoid"])
def test_routes_are_computed_in_float32_and_nan_is_loud(kind: str) -> None:
    logits = jnp.asarray(random_rows(5, 8)).astype(jnp.bfloat16)
    ids, weights = jax.jit(lambda x: route(x, 2, kind=kind))(logits)
    want_ids, want = route(logits.astype(jnp.float32), 2, kind=kind)
    assert weights.dtype == jnp.float32 and np.array_equal(ids, want_ids)
    np.testing.assert_allclose(weights, want, rtol=1e-6)
    ids, weights = route(logits.at[3, 5].set(jnp.nan), 2, kind=kind)
    assert np.isnan(weights[3]).all() and np.isfinite(np.delete(weights, 3, 0)).all()
    assert ((ids >= 0) & (ids < 8)).all()


def test_scores_that_are_all_zero_do_not_divide_by_zero() -> None:
    logits = jnp.full((1, 4), -200.0, jnp.float32)
    _, weights = route(logits, 2, kind="sigmoid", normalize=True)
    assert np.isfinite(weights).all()


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(kind="softmaxx"), "kind is 'softmaxx'; there are softmax, topk_softmax, sigmoid"),
        (dict(k=0), "k is 0"),
        (dict(k=9), "there are 8 experts to choose from"),
        (dict(k=5, num_groups=4, num_kept_groups=2), r"4 experts .*\(2 of 4 groups of 2\)"),
        (dict(num_groups=3), "1 of 3 groups of 8 experts"),
        (dict(num_groups=2, num_kept_groups=3), "3 of 2 groups"),
        (dict(kind="sigmoid", num_groups=8, num_kept_groups=4), "a group's two best"),
        (dict(kind="topk_softmax", normalize=True), "have the sum 1"),
        (dict(bias=jnp.zeros(7, jnp.float32)), "bias"),
    ],
)
def test_impossible_routes_are_errors(change: dict[str, Any], message: str) -> None:
    logits = jnp.zeros((2, 8), jnp.float32)
    # TypeError: the type checker that tests put on every function may be first.
    with pytest.raises((ValueError, TypeError), match=message):
        route(**{"logits": logits, "k": 2, "kind": "softmax", **change})


# ---- The plain form -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens,num_experts,k", [(1, 8, 2), (1, 1, 1), (5, 3, 3), (19, 64, 8), (130, 8, 2), (300, 2, 1)]
)
def test_plain_form_against_float64(tokens: int, num_experts: int, k: int) -> None:
    x, weights = jnp.asarray(random_rows(tokens, 32)), random_floats(num_experts)
    ids, scales = random_choices(tokens, num_experts, k)
    residual = jnp.asarray(random_rows(tokens, 32, seed=5))
    y = jax.jit(expert_mlp, static_argnames=("activation", "implementation"))(
        x, ids, scales, *weights, activation="silu", residual=residual, implementation="xla"
    )
    want = reference(x, ids, scales, *weights) + np.asarray(residual, np.float64)
    atol = tolerance("float32", 48 * k)["atol"] * np.abs(want).max()
    np.testing.assert_allclose(y, want, rtol=0, atol=atol)


@pytest.mark.parametrize("name", ["Q4_K", "Q8_0", "MXFP4", "BF16"])
def test_weights_of_any_format(name: str) -> None:
    if name == "MXFP4":  # of no native kernel
        rng = np.random.default_rng(0)
        from infer.quant.blocks import FORMATS

        blocks = rng.integers(0, 256, (4, 256, 8, 17), np.uint8)
        blocks[..., 0] = rng.integers(118, 124, blocks.shape[:-1])  # 2^-9 to 2^-4
        data = blocks.reshape(4, 256, -1)
        weights = [QArray.create(data, FORMATS[name], (4, 256, 256)) for _ in range(3)]
    else:
        weights = [random_experts(name, (4, 256, 256), seed=i) for i in range(3)]
    x = jnp.asarray(random_rows(11, 256))
    ids, scales = random_choices(11, 4, 2)
    y = expert_mlp(x, ids, scales, *weights, activation="silu")
    want = reference(x, ids, scales, *map(dense, weights))
    atol = tolerance("float32", 512)["atol"] * np.abs(want).max()
    np.testing.assert_allclose(y, want, rtol=0, atol=atol)


def test_products_in_bfloat16_sums_in_float32() -> None:
    x = jnp.asarray(random_rows(9, 32)).astype(jnp.bfloat16)
    weights = [w.astype(jnp.bfloat16) for w in random_floats(4)]
    ids, scales = random_choices(9, 4, 2)
    y = expert_mlp(x, ids, scales, *weights, activation="silu", residual=x)
    assert y.dtype == jnp.bfloat16
    want = reference(x, ids, scales, *weights)
    want += np.asarray(x, np.float64)
    atol = tolerance("bfloat16", 1)["atol"] * np.abs(want).max()
    np.testing.assert_allclose(np.asarray(y, np.float64), want, rtol=0, atol=atol)


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu"])
def test_other_activations(activation: str) -> None:
    x, weights = jnp.asarray(random_rows(3, 32)), random_floats(2)
    ids, scales = jnp.asarray([[0], [1], [1]], jnp.int32), jnp.ones((3, 1), jnp.float32)
    y = expert_mlp(x, ids, scales, *weights, activation=activation)
    gate, up, down = (w[jnp.asarray([0, 1, 1])] for w in weights)
    g, u = jnp.einsum("td,tfd->tf", x, gate), jnp.einsum("td,tfd->tf", x, up)
    h = jax.nn.gelu(g, approximate=activation == "gelu_tanh") * u
    np.testing.assert_allclose(y, jnp.einsum("tf,tdf->td", h, down), rtol=1e-4, atol=1e-4)


def test_the_id_e_adds_nothing_and_any_other_is_nan() -> None:
    x, weights = jnp.asarray(random_rows(8, 32)), random_floats(5)
    ids, scales = random_choices(8, 5, 2)
    run = lambda ids, scales: np.asarray(
        expert_mlp(x, ids, scales, *weights, activation="silu", residual=x)
    )
    odd = ids.at[1].set(5).at[2, 0].set(-1).at[3, 1].set(6).at[4, 0].set(-(2**31))
    odd = odd.at[5, 1].set(2**31 - 1).at[6, 0].set(5)
    y = run(odd, scales.at[1].set(jnp.nan))
    assert np.array_equal(y[1], x[1]) and np.isnan(y[2:6]).all()
    np.testing.assert_allclose(y[6], run(ids, scales.at[6, 0].set(0))[6], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(y[[0, 7]], run(ids, scales)[[0, 7]], rtol=1e-4, atol=1e-5)


def test_no_tokens() -> None:
    ids, scales = jnp.zeros((0, 2), jnp.int32), jnp.zeros((0, 2), jnp.float32)
    x = jnp.zeros((0, 32), jnp.float32)
    assert expert_mlp(x, ids, scales, *random_floats(3), activation="silu").shape == (0, 32)


def test_gradients_are_those_of_all_experts_at_once() -> None:
    x, weights = jnp.asarray(random_rows(7, 32)), random_floats(4)
    ids, scales = random_choices(7, 4, 2)

    def all_at_once(x: jax.Array, scales: jax.Array, gate: Any, up: Any, down: Any) -> jax.Array:
        g, u = jnp.einsum("td,efd->tef", x, gate), jnp.einsum("td,efd->tef", x, up)
        y = jnp.einsum("tef,edf->ted", jax.nn.silu(g) * u, down)
        chosen = jnp.take_along_axis(y, ids[:, :, None], axis=1)
        return jnp.sum(jnp.sin(jnp.einsum("tk,tkd->td", scales, chosen)))

    plain = lambda x, scales, *w: jnp.sum(
        jnp.sin(expert_mlp(x, ids, scales, *w, activation="silu"))
    )
    got = jax.grad(plain, argnums=(0, 1, 2, 3, 4))(x, scales, *weights)
    want = jax.grad(all_at_once, argnums=(0, 1, 2, 3, 4))(x, scales, *weights)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * float(jnp.abs(b).max()))


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_every_pair_has_a_row_of_its_own_in_a_block_of_its_expert(data: st.DataObject) -> None:
    tokens, k = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 4))
    num_experts = data.draw(st.integers(1, 9))
    ids = np.asarray(
        data.draw(st.lists(st.integers(0, num_experts), min_size=tokens * k, max_size=tokens * k)),
        np.int32,
    ).reshape(tokens, k)
    with jax.disable_jit():
        token, expert, slot = map(np.asarray, experts._blocks(jnp.asarray(ids), num_experts))
    rows = token.shape[1]
    there = ids < num_experts
    slots = slot[there]
    assert len(set(slots.tolist())) == there.sum() and (slot[~there] == token.size).all()
    assert np.array_equal(token.reshape(-1)[slots], np.nonzero(there)[0])
    assert np.array_equal(expert[slots // rows], ids[there])
    assert (token != tokens).sum() == there.sum()
    assert ((expert < num_experts) == (token != tokens).any(axis=1)).all()
    # Far fewer rows than tokens * num_experts where there are many.
    assert token.size <= tokens * k + min(num_experts, tokens * k) * (rows - 1)


def test_a_packed_weight_is_decoded_an_expert_at_a_time() -> None:
    weights = [random_experts("Q8_0", (16, 64, 64), seed=i) for i in range(3)]
    ids, scales = random_choices(256, 16, 2)
    run = jax.jit(lambda x, ids, scales, w: expert_mlp(x, ids, scales, *w, activation="silu"))
    compiled = run.lower(jnp.zeros((256, 64), jnp.float32), ids, scales, weights).compile()
    text = compiled.as_text()
    assert "f32[64,64]" in text and "f32[16,64,64]" not in text


def test_choice_and_refusals() -> None:
    x, weights = jnp.asarray(random_rows(3, 32)), random_floats(4)
    ids, scales = random_choices(3, 4, 2)
    with choice.recording() as made:
        expert_mlp(x, ids, scales, *weights, activation="silu")
    assert [(c.op, c.implementation) for c in made] == [("expert_mlp", "xla")]
    gate, up, down = weights
    call = lambda **change: expert_mlp(
        **{
            **dict(x=x, expert_ids=ids, expert_weights=scales, gate=gate, up=up, down=down),
            **dict(activation="silu"),
            **change,
        }
    )
    for change, message in [
        (dict(expert_ids=ids[:2]), "expert_ids"),
        (dict(expert_weights=scales[:, :1]), "expert_weights"),
        (dict(down=up), r"must be \[E, F, 32\]"),
        (dict(gate=gate[0]), r"must be \[E, F, 32\]"),
        (dict(residual=x[:2]), "residual"),
        (dict(activation="relu"), "activation is 'relu'"),
        (dict(implementation="fast"), "implementation is 'fast'"),
    ]:
        with pytest.raises((ValueError, TypeError), match=message):
            call(**change)


@pytest.mark.parametrize("name", ["float", "Q8_0", "Q4_0"])
def test_the_grouped_kernels_give_the_plain_form(name: str) -> None:
    if name == "float":
        weights: list[Any] = random_floats(5, 32, 48)
    else:
        weights = jax.device_put([random_experts(name, (5, 64, 64), seed=i) for i in range(3)])
    x = jnp.asarray(random_rows(9, weights[0].shape[2]))
    ids, scales = random_choices(9, 5, 2)
    ids = ids.at[1].set(5).at[2, 0].set(-1).at[6, 0].set(5)  # nobody, not there, one of two
    scales = scales.at[1].set(jnp.nan)
    run = lambda form: np.asarray(
        expert_mlp(x, ids, scales, *weights, activation="silu", residual=x, implementation=form)
    )
    with choice.recording() as made:
        y = run("interpret")
    assert [(c.op, c.implementation) for c in made] == [("expert_mlp", "interpret")]
    want = run("xla")
    assert np.array_equal(y[1], x[1]) and np.isnan(y[2]).all()
    np.testing.assert_allclose(y, want, rtol=0, atol=2e-6 * np.nanmax(np.abs(want)))


def test_what_the_grouped_kernels_do_not_take_is_named() -> None:
    x, weights = jnp.asarray(random_rows(3, 32)), random_floats(4)
    ids, scales = random_choices(3, 4, 2)
    with pytest.raises(NotImplementedError, match=r"'gelu'.*on a CPU"):
        expert_mlp(x, ids, scales, *weights, activation="gelu", implementation="interpret")


def test_packed_weights_run_natively_and_nowhere_else() -> None:
    if not native.available():
        pytest.skip(native.why_not())
    x, weights = jnp.asarray(random_rows(3, 32)), [repack(w) for w in random_floats(4, 32, 32)]
    ids, scales = random_choices(3, 4, 2)
    run = lambda *w, **more: expert_mlp(x, ids, scales, *w, **{"activation": "silu", **more})
    with choice.recording() as made:
        y = run(*weights)
    assert [(c.op, c.implementation) for c in made] == [("expert_mlp", "native")]
    np.testing.assert_allclose(y, run(*random_floats(4, 32, 32)), rtol=1e-5, atol=1e-5)
    assert run(*weights).dtype == x.dtype
    with pytest.raises(NotImplementedError, match="expert_mlp in xla: the weights are packed"):
        run(*weights, implementation="xla")
    with pytest.raises(NotImplementedError, match="no native expert_mlp with 'gelu'"):
        run(*weights, activation="gelu")
    with pytest.raises(ValueError, match=r"Packed, Packed, .*; pack all three or none"):
        run(*weights[:2], random_floats(4, 32, 32)[2])


# ---- Experts as one QArray ----------------------------------------------------------------------


def test_a_qarray_of_experts_is_each_experts_qarray() -> None:
    q = random_experts("Q4_1", (3, 5, 64))
    assert isinstance(q, QArray) and q.nbytes == 3 * 5 * 40
    for e in range(3):
        one = dataclasses.replace(q, data=q.data[e], shape=q.shape[1:])
        assert np.array_equal(dequantize(q)[e], dequantize(one))
    from infer.quant.qarray import permute_rows, take_rows

    with pytest.raises(ValueError, match="rows in each expert"):
        take_rows(q, jnp.zeros(2, jnp.int32))
    with pytest.raises(ValueError, match="rows in each expert"):
        permute_rows(q, np.arange(3))
    with pytest.raises(ValueError, match=r"of shape \(3, 5, 64\) is uint8 \(3, 5, 40\)"):
        QArray.create(q.data[:2], q.format, q.shape)


@pytest.mark.parametrize("name", ["int4 g32", "nvfp4", "fp8 e4m3"])
def test_planar_experts_are_their_decoded_ones(name: str) -> None:
    method = {"int4 g32": RTN(bits=4, group_size=32), "nvfp4": NVFP4(), "fp8 e4m3": FP8()}[name]
    rng = np.random.default_rng(0)
    of = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    packed = [method.pack_experts(of(*s)) for s in ((4, 64, 32), (4, 64, 32), (4, 32, 64))]
    x, ids = of(6, 32), jnp.asarray([[0, 2], [1, 0], [2, 1], [0, 1], [2, 0], [4, 4]], jnp.int32)
    scales = jnp.full((6, 2), 0.5, jnp.float32)
    run = lambda weights, form: expert_mlp(
        x, ids, scales, *weights, activation="silu", implementation=form
    )
    want = run([dequantize(w) for w in packed], "xla")
    for form in ("xla", "interpret"):
        np.testing.assert_allclose(run(packed, form), want, rtol=1e-4, atol=2e-4)
    if native.available():
        with pytest.raises(NotImplementedError, match="no native kernel for experts' weights in"):
            repack(packed[0])


def test_packed_is_a_pytree_of_one_array() -> None:
    if not native.available():
        pytest.skip(native.why_not())
    packed = repack(random_experts("Q4_0", (2, 32, 32)))
    assert isinstance(packed, Packed) and len(jax.tree.leaves(packed)) == 1
