"""The door to jax-triton: what it refuses before Triton sees it, and what is missing, in words."""

import re

import jax
import jax.numpy as jnp
import pytest

from infer.jax_triton import packages
from infer.jax_triton.kernel_call import _described_capability, kernel_call

pytestmark = pytest.mark.kernels

OUT = jax.ShapeDtypeStruct((4,), jnp.float32)


def _versions(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise packages.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(packages.metadata, "version", version)


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        (
            {},
            r"jax-triton is not installed \(pip install 'jax-triton>=0.3,<0.4' 'triton>=3.6,<3.7'",
        ),
        ({"jax-triton": "0.3.1"}, r"triton is not installed \(pip install"),
        ({"jax-triton": "0.4.0", "triton": "3.6.0"}, r"jax-triton is 0.4.0, and needed is 0.3 \("),
        ({"jax-triton": "0.3.1", "triton": "3.9.0"}, r"triton is 3.9.0, and needed is 3.6 \("),
    ],
)
def test_what_is_missing_is_named_with_its_install(
    versions: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _versions(monkeypatch, **versions)
    lack = packages.missing()
    assert lack and re.match(message, lack)


def test_the_tested_pair_lacks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    _versions(monkeypatch, **{"jax-triton": "0.3.1", "triton": "3.6.0"})
    assert packages.missing() is None


@pytest.mark.parametrize(
    ("size", "launch", "error", "message"),
    [
        (0, {}, ValueError, r"name got an array of shape \(0,\); no dimension may be 0"),
        (2**31, {}, NotImplementedError, "array of 2147483648 elements of uint8 has offsets past"),
        (8, {"num_warps": 3}, ValueError, "num_warps is 3; use 1, 2, 4"),
        (8, {"num_stages": 0}, ValueError, "num_stages is 0; use 1 or more"),
    ],
)
def test_what_cannot_be_launched_is_refused(
    size: int, launch: dict[str, int], error: type[Exception], message: str
) -> None:
    options = {"name": "name", "grid": (1,), "out_shape": OUT, "num_warps": 4} | launch
    with pytest.raises(error, match=message):
        jax.eval_shape(
            lambda x: kernel_call(None, x, **options), jax.ShapeDtypeStruct((size,), jnp.uint8)
        )


@pytest.mark.parametrize(("kind", "capability"), [("NVIDIA H200", 90), ("NVIDIA L4", 89)])
def test_code_is_for_the_gpu_that_the_mesh_describes(kind: str, capability: int) -> None:
    assert _described_capability() is None
    device = jax.sharding.AbstractDevice(kind, 1, "gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        assert _described_capability() == capability
