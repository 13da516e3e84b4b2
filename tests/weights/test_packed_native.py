"""Quantised folders on a CPU with native operations: repacked on loading, and the same model."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import infer
from infer import native, quant
from infer.cli.info import report_of, summary_of
from infer.models import decoder
from infer.models.params import random_params
from infer.native.repack import Packed, repack
from infer.ops.linear import embed, linears
from infer.quant.qarray import QArray, dequantize
from tests.models import tiny, tiny_folder

pytestmark = pytest.mark.skipif(not native.by_default(), reason="no native operations here")


def test_repacked_on_loading_and_what_has_no_kernel_stays(tmp_path: Path) -> None:
    tokenizer = infer.load(tiny_folder.write(tmp_path / "source")).tokenizer
    fields = dict(vocab_size=268, num_tokens=267, intermediate_size=64, max_context=512)
    params = random_params(tiny.llama_config(**fields), seed=4)
    recipe = {
        "layers.0.down": quant.RTN(bits=4, group_size=8),  # groups that no kernel takes
        "layers.*.down": quant.NF4(group_size=32),
        "layers.*": quant.RTN(bits=4, group_size=32),
    }
    packed = infer.quantize(params, recipe)
    infer.save(packed, tmp_path / "m", tokenizer=tokenizer)
    loaded = infer.load(tmp_path / "m", packed=True).params
    assert isinstance(loaded.layers[0].q, Packed) and isinstance(loaded.layers[1].down, Packed)
    assert isinstance(loaded.layers[0].down, QArray)
    ids = jnp.arange(24, dtype=jnp.int32)[None] * 7
    have, want = (np.asarray(decoder.forward(p, ids))[..., :267] for p in (loaded, packed))
    # Activations are rounded to 8 bits.
    assert np.abs(have - want).max() < 0.05 * np.abs(want).max()
    found, files = summary_of(tmp_path / "m")
    said = report_of("m", files, found, None)["quantisation"]
    assert said["in_xla"] == ("INT4-G8",)
    with pytest.raises(infer.ConfigError, match="in the order of this CPU's native operations"):
        infer.save(loaded, tmp_path / "again", tokenizer=tokenizer)
    assert not (tmp_path / "again").exists()


def test_turned_weights_turn_their_input_natively() -> None:
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((24, 64), (3, 64)))
    gain = jnp.asarray(1 + 0.1 * rng.standard_normal(64), jnp.float32)
    q = quant.RTN(bits=4, group_size=32, hadamard="full").pack(w)
    for norm in (None, (gain, 1e-5)):
        have = linears(x, (repack(q),), (None,), norm=norm)[0]
        want = linears(x, (q,), (None,), norm=norm, implementation="xla")[0]
        # Activations are rounded to 8 bits.
        assert np.abs(have - want).max() < 0.02 * np.abs(want).max()
    rows = embed(repack(q), jnp.asarray([5, 0], jnp.int32), jnp.float32)
    np.testing.assert_allclose(rows, dequantize(q)[np.array([5, 0])], atol=1e-5)
