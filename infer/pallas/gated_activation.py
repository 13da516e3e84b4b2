"""The gate of a gated MLP, act(gate) * up, in one pass.  Pallas-Triton.

    SwiGLU: act(x) = x / (1 + exp(-x))
    GeGLU:  act(x) = x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2

Source: Shazeer 2020, arXiv 2002.05202.  GELU by the error function is not here: Pallas-Triton has
no erf.

Grid (T, F / block).  A program owns `block` columns of one row.
Bytes: 3 T F elements.  FLOPs: about 10 T F.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jaxtyping import Float

from infer.pallas.triton_call import check_launch, load, store, triton_call

ACTIVATIONS = ("silu", "gelu_tanh")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedActivationBlocks:
    """Columns a program owns, and its warps."""

    block: int = 1024
    num_warps: int = 4

    def __post_init__(self) -> None:
        """Check what Triton asks for."""
        if self.block < 1 or self.block & (self.block - 1):
            raise ValueError(f"block is {self.block}; use a power of two")
        check_launch(self.num_warps)


def act(x: Array, activation: str) -> Array:
    """Return the activation of float32 x."""
    if activation == "silu":
        return x / (1.0 + jnp.exp(-x))
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return 0.5 * x * (1.0 + jnp.tanh(inner))


def _kernel(
    # inputs
    gate_ref,  # [T, F]
    up_ref,  # [T, F]
    # outputs
    out_ref,  # [T, F]
    *,
    block: int,
    activation: str,
) -> None:
    t = pl.program_id(0)
    f = pl.program_id(1) * block + jnp.arange(block, dtype=jnp.int32)
    inside = f < gate_ref.shape[1]
    gate = load(gate_ref, t, f, mask=inside, other=0.0).astype(jnp.float32)
    up = load(up_ref, t, f, mask=inside, other=0.0)
    # The activation takes the activations' dtype before the product, as the plain form does.
    value = act(gate, activation).astype(up.dtype) * up
    store(out_ref, t, f, value=value, mask=inside)


def gated_activation(
    gate: Float[Array, "T F"],
    up: Float[Array, "T F"],
    activation: str,
    *,
    blocks: GatedActivationBlocks | None = None,
    interpret: bool = False,
) -> Float[Array, "T F"]:
    """Return act(gate) * up in up's dtype, act computed in float32.

    Args:
        gate: the gate's projection.
        up: the other projection.
        activation: "silu" or "gelu_tanh".
        blocks: the kernel's sizes.
        interpret: run on any device, slowly.

    Raises:
        ValueError: gate and up differ in shape.
        NotImplementedError: another activation.
    """
    if activation not in ACTIVATIONS:
        raise NotImplementedError(
            f"gated_activation in Triton: shape {gate.shape} of {gate.dtype} with activation "
            f"{activation!r}; there are {', '.join(ACTIVATIONS)}"
        )
    if gate.shape != up.shape:
        raise ValueError(f"gate is {gate.shape}, up {up.shape}; they must be alike")
    blocks = blocks or GatedActivationBlocks()
    rows, width = gate.shape
    return triton_call(
        functools.partial(_kernel, block=blocks.block, activation=activation),
        gate,
        up,
        name="gated_activation",
        grid=(rows, -(-width // blocks.block)),
        out_shape=jax.ShapeDtypeStruct(up.shape, up.dtype),
        num_warps=blocks.num_warps,
        interpret=interpret,
    )


def gated_activation_reference(gate: Array, up: Array, activation: str) -> Array:
    """Compute the same with jax.nn."""
    functions = {
        "silu": jax.nn.silu,
        "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    }
    return functions[activation](gate.astype(jnp.float32)).astype(up.dtype) * up
