"""The compiled program of a quantised product: a tile of the weight as numbers, never all of it."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer import quant
from infer.models import decoder
from infer.models.params import random_params
from infer.ops.linear import linear
from infer.quant.qarray import QArray
from tests.models import tiny

OUT, IN = 6144, 1024  # twelve tiles
METHODS = {
    "int4 groups": quant.RTN(bits=4, group_size=128),
    "int3 channel": quant.RTN(bits=3, group_size="channel"),
    "int4 asymmetric": quant.RTN(bits=4, group_size=64, symmetric=False),
    "int8 and int8 activations": quant.RTN(bits=8, group_size="channel", activations="int8"),
    "llm.int8": quant.LLMInt8(),
    "fp8 blocks": quant.FP8(granularity="block", activations="block"),
    "nf4": quant.NF4(),
    "mxfp4": quant.MX(),
    "nvfp4": quant.NVFP4(),
}
_BYTES = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2}


def float_buffers(program: str, at_least: int) -> set[str]:
    """Return the arrays of floats in a program's text that have so many elements."""
    found = set()
    for kind, dims in re.findall(r"\b(f64|f32|bf16|f16)\[([\d,]+)\]", program):
        if math.prod(map(int, dims.split(","))) >= at_least:
            found.add(f"{kind}[{dims}]")
    return found


def _stand_in(method: quant.Method) -> QArray:
    weight = jax.ShapeDtypeStruct((OUT, IN), jnp.float32)
    return jax.eval_shape(method.pack, weight)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "float32") for name in METHODS), ("int4 groups", "bfloat16"), ("nf4", "bfloat16")],
)
def test_no_matrix_is_decoded_whole(name: str, dtype: str) -> None:
    x = jax.ShapeDtypeStruct((4, IN), jnp.dtype(dtype))
    compiled = jax.jit(linear).lower(x, _stand_in(METHODS[name])).compile()
    assert not float_buffers(compiled.as_text(), OUT * IN)
    # int8 activations make int8 of all codes; a tile of anything else is at most a few copies of 2
    # MB.
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * OUT * IN


def test_the_search_finds_a_matrix_that_is_decoded_whole() -> None:
    weight = _stand_in(METHODS["int4 groups"])
    x = jax.ShapeDtypeStruct((4, IN), jnp.float32)
    whole = lambda x, w: x @ quant.dequantize(w).T
    compiled = jax.jit(whole).lower(x, weight).compile()
    assert float_buffers(compiled.as_text(), OUT * IN)


def test_a_whole_forward_decodes_no_table_and_no_head() -> None:
    config = tiny.llama_config(vocab_size=20480, num_tokens=20480, hidden_size=64)
    params = random_params(config, seed=0)
    table = jax.jit(quant.NF4().pack)(params.embed)
    params = dataclasses.replace(params, embed=table)
    tokens = jax.ShapeDtypeStruct((1, 4), jnp.int32)
    compiled = jax.jit(decoder.forward).lower(params, tokens).compile()
    assert not float_buffers(compiled.as_text(), 20480 * 64)
    assert np.isfinite(np.asarray(compiled(params, jnp.zeros((1, 4), jnp.int32)))).all()
