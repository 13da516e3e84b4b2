"""Products of sorted tokens with their experts' weights, interpreted, against one expert at a
time.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.pallas.grouped_matmul import (
    GroupedMatmulBlocks,
    grouped_matmul,
    grouped_matmul_reference,
)
from tests.cases.kernels.grouped_matmul import PLANAR, experts
from tests.typecheck import unchecked

pytestmark = pytest.mark.kernels

SHAPE = (4, 40, 256)
# An empty expert, one with more rows than a tile, and two rows of nobody at the end.
SIZES = jnp.asarray([3, 0, 20, 5], jnp.int32)
USED = 28
X = jax.random.normal(jax.random.key(0), (30, 256), jnp.float32)


@pytest.mark.parametrize("name", ["float32", "Q4_K", "Q8_0", "MXFP4", *PLANAR])
def test_equals_one_expert_at_a_time(name: str) -> None:
    gate, up = (experts(name, SHAPE, jax.random.key(k)) for k in (1, 2))
    y = grouped_matmul(X, gate, SIZES, interpret=True)
    want = grouped_matmul_reference(X, gate, SIZES)
    np.testing.assert_allclose(y[:USED], want[:USED], rtol=1e-5, atol=1e-5)
    y = grouped_matmul(X, gate, SIZES, up=up, activation="silu", interpret=True)
    want = grouped_matmul_reference(X, gate, SIZES, up, "silu")
    np.testing.assert_allclose(y[:USED], want[:USED], rtol=1e-4, atol=1e-4)


def test_a_row_has_the_same_bits_whoever_is_beside_it() -> None:
    weight, x = experts("Q8_0", SHAPE, jax.random.key(1)), X.astype(jnp.bfloat16)
    y = grouped_matmul(x, weight, SIZES, interpret=True)
    alone = grouped_matmul(x[4:5], weight, jnp.asarray([0, 0, 1, 0]), interpret=True)
    np.testing.assert_array_equal(np.asarray(alone[0]), np.asarray(y[4]))


def test_no_tokens_for_anyone_is_no_work() -> None:
    weight = experts("float32", SHAPE, jax.random.key(1))
    y = grouped_matmul(X, weight, jnp.zeros(4, jnp.int32), interpret=True)
    assert y.shape == (30, 40)


def test_refuses_what_does_not_fit() -> None:
    weight = experts("float32", SHAPE, jax.random.key(1))
    with unchecked(), pytest.raises(ValueError, match=r"weights must be \(3, O, 256\)"):
        grouped_matmul(X, weight, SIZES[:3], interpret=True)
    with pytest.raises(ValueError, match="pass both or neither"):
        grouped_matmul(X, weight, SIZES, activation="silu", interpret=True)
    with pytest.raises(NotImplementedError, match="'gelu' with weights"):
        grouped_matmul(X, weight, SIZES, up=weight, activation="gelu", interpret=True)
    with pytest.raises(NotImplementedError, match="steps of other widths"):
        up = experts("Q4_K", SHAPE, jax.random.key(2))
        grouped_matmul(X, weight, SIZES, up=up, activation="silu", interpret=True)
    with pytest.raises(ValueError, match="block_out is 8"):
        GroupedMatmulBlocks(block_out=8)
