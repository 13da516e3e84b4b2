"""Activations, and the gate of a gated MLP."""

import functools

import jax
from jax import Array
from jaxtyping import Float

from infer.ops.choice import choose, with_xla_gradient

_FUNCTIONS = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
}


def activate(x: Float[Array, "*B F"], activation: str) -> Float[Array, "*B F"]:
    """Return "silu", "gelu_tanh" or "gelu" of x, in x's dtype."""
    if activation not in _FUNCTIONS:
        raise ValueError(f"activation is {activation!r}; there are {', '.join(_FUNCTIONS)}")
    return _FUNCTIONS[activation](x)


def gated_activation(
    gate: Float[Array, "T F"],
    up: Float[Array, "T F"],
    activation: str,
    implementation: str | None = None,
) -> Float[Array, "T F"]:
    """Return act(gate) * up.  Source: Shazeer 2020, arXiv 2002.05202."""
    xla = lambda gate, up: activate(gate, activation) * up
    kernel = lambda interpret: with_xla_gradient(
        functools.partial(_gated_activation_triton, activation=activation, interpret=interpret),
        xla,
    )
    return choose(
        "gated_activation",
        (gate, up),
        xla=xla,
        kernels={"triton": kernel(False), "interpret": kernel(True)},
        preferred=(),  # XLA fuses the whole of it
        implementation=implementation,
    )


def _gated_activation_triton(gate: Array, up: Array, *, activation: str, interpret: bool) -> Array:
    from infer.pallas.gated_activation import gated_activation as kernel

    return kernel(gate, up, activation, interpret=interpret)
