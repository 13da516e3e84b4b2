"""Files of plain numbers whose matrices stay as they are, for the native products."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from infer.models import decoder
from infer.models.params import random_params
from infer.native.repack import Packed
from infer.weights.folder import load_folder
from infer.weights.load import load_gguf
from tests.weights.hf_folders import CONFIGS, golden_weights, write
from tests.weights.test_load import _config as config_of
from tests.weights.test_load import _write as gguf_file


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
def test_a_folder(name: str, kind: str, tmp_path: Path) -> None:
    dtype = jnp.dtype(kind)
    weights = {key: np.asarray(x).astype(dtype) for key, x in golden_weights(name).items()}
    folder = write(tmp_path, CONFIGS[name], weights)
    plain, packed = load_folder(folder), load_folder(folder, packed=True)
    leaves = [packed.embed, *(w for layer in packed.layers for w in (layer.q, layer.down))]
    formats = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
    wide = [x for x in leaves if x.shape[1] % 32 == 0]
    assert wide and all(isinstance(x, Packed) and x.format == formats[kind] for x in wide)
    ids = jnp.asarray([[5, 3, 60, 7, 2, 11, 9]], jnp.int32)
    one, other = decoder.forward(packed, ids), decoder.forward(plain, ids)
    np.testing.assert_allclose(one, other, atol=2e-4)


def test_half_precision_in_gguf(tmp_path: Path) -> None:
    half = lambda name, x: x.astype(np.float16) if x.ndim == 2 else x
    path = gguf_file(tmp_path / "m.gguf", random_params(config_of("llama"), seed=3), change=half)
    plain, packed = load_gguf(path), load_gguf(path, packed=True)
    assert isinstance(packed.layers[0].q, Packed) and packed.layers[0].q.format == "F16"
    ids = jnp.asarray([[1, 2, 3, 5, 8]], jnp.int32)
    one, other = (decoder.forward(p, ids)[..., :90] for p in (packed, plain))
    np.testing.assert_allclose(one, other, atol=1e-4)
