"""Who chooses an op's implementation, and what can be asked about it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import infer
from infer.errors import ConfigError
from infer.jax_triton import packages
from infer.models.params import random_params
from infer.ops import choice
from infer.ops.attention import dense_attention, paged_attention
from infer.ops.linear import linear
from infer.ops.norm import rms_norm
from infer.quant import rtn
from infer.sampling import SamplingParams
from tests.models import tiny

pytestmark = pytest.mark.kernels

X = jnp.ones((2, 8), jnp.float32)
GAIN = jnp.ones(8, jnp.float32)


def test_without_a_gpu_plain_xla_runs_and_says_why() -> None:
    with choice.recording() as choices:
        rms_norm(X, GAIN, 1e-6)
        rms_norm(X, GAIN, 1e-6)
    assert choices == [choice.Choice("rms_norm", "xla", "no GPU")]


def test_a_forced_name_is_run() -> None:
    with choice.recording() as choices:
        y = rms_norm(X, GAIN, 1e-6, "interpret")
    assert choices == [choice.Choice("rms_norm", "interpret")]
    np.testing.assert_allclose(y, rms_norm(X, GAIN, 1e-6, "xla"), rtol=1e-6)


def test_a_kernel_without_its_gpu_is_an_error_that_names_the_way_out() -> None:
    for name in ("triton", "mosaic", "jax_triton"):  # the op need not have that form
        with pytest.raises(NotImplementedError, match=rf"rms_norm in {name} needs an NVIDIA GPU"):
            rms_norm(X, GAIN, 1e-6, name)


@pytest.mark.parametrize("name", ["cuda", "", "Triton"])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"'xla', 'native', .*, 'jax_triton', 'interpret'"):
        rms_norm(X, GAIN, 1e-6, name)
    with pytest.raises(ConfigError, match="implementation is"):
        infer.generate(tiny.llama(), [[1]], implementation=name)


def test_a_described_gpu_is_the_one_programs_are_traced_for() -> None:
    """Kernels that cannot do it are passed over, with the reason; XLA comes last."""

    def refuse(x: jax.Array) -> jax.Array:
        raise NotImplementedError("no such shape")

    double = lambda x: x * 2
    device = jax.sharding.AbstractDevice("NVIDIA H200", 132, "gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)

    def run(preferred: tuple[str, ...]) -> list[choice.Choice]:
        with jax.sharding.use_abstract_mesh(mesh), choice.recording() as choices:
            assert choice.target_gpu() == choice.Gpu("NVIDIA H200", (9, 0))
            y = jax.eval_shape(
                lambda x: choice.choose(
                    "op",
                    (x,),
                    xla=double,
                    kernels={"mosaic": refuse, "triton": double},
                    preferred=preferred,
                    implementation=None,
                ),
                X,
            )
        assert y.shape == X.shape
        return choices

    assert run(("mosaic", "triton")) == [choice.Choice("op", "triton")]
    assert run(("mosaic",)) == [choice.Choice("op", "xla", "no such shape")]


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("NVIDIA A100-SXM4-80GB", "mosaic", r"needs a Hopper GPU .*not NVIDIA A100.*\(8, 0\)"),
        ("NVIDIA H200", "jax_triton", r"jax_triton: jax-triton is not installed \(pip install '"),
    ],
)
def test_a_chip_that_cannot_is_named(
    kind: str, name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages.metadata, "version", _no_package)
    device = jax.sharding.AbstractDevice(kind, 1, "gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        with pytest.raises(NotImplementedError, match=message):
            jax.eval_shape(lambda x: rms_norm(x, GAIN, 1e-6, name), X)


def _no_package(name: str) -> str:
    raise packages.metadata.PackageNotFoundError(name)


def test_ops_of_attention_agree_in_both_forms() -> None:
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    q, k, v = draw(2, 5, 4, 16), draw(2, 5, 2, 16), draw(2, 5, 2, 16)
    options = dict(scale=0.25, window=3, softcap=5.0, sinks=draw(4))
    dense = lambda name: dense_attention(q, k, v, implementation=name, **options)
    np.testing.assert_allclose(dense("interpret"), dense("xla"), atol=2e-6)
    k_pages, v_pages = draw(6, 2, 4, 16), draw(6, 2, 4, 16)
    table = jnp.asarray([[5, 0, 6], [2, 3, 6]], jnp.int32)
    for count in (1, 40):  # few queries, and a prefill chunk of more than a tile
        positions = jnp.asarray(np.arange(count)[None, :] + [[2], [0]], jnp.int32)
        positions = jnp.where(positions < 8, positions, -1)
        q = draw(2, count, 4, 16)
        paged = lambda name, q=q, positions=positions: paged_attention(
            q, k_pages, v_pages, table, positions, implementation=name, **options
        )
        np.testing.assert_allclose(paged("interpret"), paged("xla"), atol=2e-6)


@pytest.mark.parametrize("ordered", [False, True])
def test_a_packed_weight_is_multiplied_in_the_kernel(ordered: bool) -> None:
    rng = np.random.default_rng(2)
    w, x = (jnp.asarray(rng.standard_normal((n, 64)), jnp.float32) for n in (24, 3))
    weight = rtn.quantize_int(w, rtn.int_format(4, 32))
    if ordered:
        perm = jnp.asarray(rng.permutation(64), jnp.int32)
        format = dataclasses.replace(weight.format, ordered=True)  # type: ignore[call-arg]
        weight = dataclasses.replace(weight, perm=perm, format=format)
    with choice.recording() as choices:
        y = linear(x, weight, implementation="interpret")
    assert choices == [choice.Choice("linear", "interpret")]
    np.testing.assert_allclose(y, linear(x, weight, implementation="xla"), rtol=1e-4, atol=1e-4)


def test_generate_gives_the_same_tokens_with_every_kernel_interpreted() -> None:
    """The whole loop through the Triton kernels: prefill, decode, sampling, page writes."""
    config = tiny.gemma3_config()  # one sliding layer of it: two would only be interpreted longer
    params = random_params(dataclasses.replace(config, layers=config.layers[:1]), seed=1)
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [11, 12], [21]]
    sampling = [
        SamplingParams(max_tokens=6, temperature=0),
        SamplingParams(max_tokens=5, temperature=1.0, top_k=20, top_p=0.9, seed=3),
        SamplingParams(max_tokens=6, temperature=0, repetition_penalty=1.3, logit_bias={5: 2.0}),
    ]
    run = lambda name: infer.generate(
        params, prompts, sampling=sampling, num_slots=2, page_size=4, implementation=name
    )
    plain, kernels = run("xla"), run("interpret")
    np.testing.assert_array_equal(plain.tokens, kernels.tokens)
    np.testing.assert_allclose(plain.logprobs, kernels.logprobs, atol=1e-5)
    assert plain.stats["implementation"] == "xla"
    assert kernels.stats["implementation"] == "interpret"
    ops = ("rms_norm", "rope_write", "paged_attention", "gated_activation", "sample")
    assert {kernels.stats["implementations"][op] for op in ops} == {"interpret"}
