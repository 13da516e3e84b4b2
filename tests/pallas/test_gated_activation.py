"""The gate of a gated MLP as one kernel, interpreted."""

import jax.numpy as jnp
import numpy as np
import pytest

from infer.pallas.gated_activation import (
    ACTIVATIONS,
    GatedActivationBlocks,
    gated_activation,
    gated_activation_reference,
)
from tests.tolerances import tolerance

pytestmark = pytest.mark.kernels

BLOCKS = GatedActivationBlocks(block=64)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equals_jax_nn(activation: str, dtype: str) -> None:
    rng = np.random.default_rng(3)
    gate, up = (jnp.asarray(rng.standard_normal((3, 150)) * 4, dtype) for _ in range(2))
    y = gated_activation(gate, up, activation, blocks=BLOCKS, interpret=True)
    want = gated_activation_reference(gate, up, activation)
    f32 = lambda x: np.asarray(x, np.float32)
    # Values up to 50, and tanh may be an ulp from -1 where the other form's is -1.
    np.testing.assert_allclose(f32(y), f32(want), **tolerance(dtype, 128))
    alone = gated_activation(gate[1:2], up[1:2], activation, blocks=BLOCKS, interpret=True)
    np.testing.assert_array_equal(f32(alone[0]), f32(y[1]))


def test_value_worked_by_hand() -> None:
    one, two = jnp.ones((1, 1), jnp.float32), jnp.full((1, 1), 2.0, jnp.float32)
    y = gated_activation(one, two, "silu", interpret=True)
    np.testing.assert_allclose(y, [[2 * 0.7310586]], rtol=1e-6)


def test_refuses_unknown_names() -> None:
    x = jnp.ones((1, 1), jnp.float32)
    with pytest.raises(NotImplementedError, match="'gelu'; there are silu, gelu_tanh"):
        gated_activation(x, x, "gelu", interpret=True)
    with pytest.raises(ValueError, match="power of two"):
        GatedActivationBlocks(block=100)
