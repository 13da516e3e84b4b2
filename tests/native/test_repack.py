"""Repacked weights: what they hold, what they refuse."""

import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from infer.errors import WeightFormatError
from infer.native import repack as repacking
from infer.native.linear import linear
from infer.native.repack import repack
from infer.quant.blocks import FORMATS as BLOCKS
from infer.quant.qarray import QArray
from infer.weights.gguf import GGUFFile
from infer.weights.gguf_writer import GGUFTensor, write_gguf
from tests.native.weights import FLOATS, FORMATS, PACKED, dense, random_weight


@pytest.mark.parametrize("name", FORMATS)
def test_about_the_same_bytes(name: str) -> None:
    weight = random_weight(name, (64, 512))
    # Q4_K's and Q5_K's scales and minima of 6 bits take a byte.
    assert 1 <= repack(weight).data.nbytes / weight.nbytes < (1.03 if name in PACKED else 1.001)


@pytest.mark.parametrize("name", FORMATS)
def test_no_bit_is_lost(name: str) -> None:
    # The products with unit vectors are the weights: 127 times a code, over 127.
    weight = random_weight(name, (5, 256))
    packed = repack(weight)
    (y,) = linear(jnp.eye(256, dtype=jnp.float32) * 127, (packed,))
    np.testing.assert_allclose(y.T / 127, dense(weight), rtol=3e-7, atol=1e-7)


def test_weights_anywhere_in_memory() -> None:
    weight = random_weight("Q4_1", (40, 64))
    wide = np.zeros((40, 50), np.uint8)
    wide[:, 3:43] = weight.data
    want = repack(weight).data
    for data in (wide[:, 3:43], np.asfortranarray(weight.data), jnp.asarray(weight.data)):
        assert np.array_equal(repack(QArray.create(data, BLOCKS["Q4_1"], (40, 64))).data, want)


def test_what_has_no_kernel_is_not_implemented() -> None:
    with pytest.raises(NotImplementedError, match="weights in IQ4_NL"):
        repack(random_weight("IQ4_NL", (4, 32)))
    with pytest.raises(NotImplementedError, match="multiple of 32, from 32 on, not 48"):
        repack(jnp.zeros((4, 48), jnp.float32))
    for dtype in FLOATS.values():
        with pytest.raises(NotImplementedError, match="multiple of 32, from 32 on, not 0"):
            repack(jnp.zeros((4, 0), dtype))
    with pytest.raises(NotImplementedError, match="int32"):
        repack(jnp.zeros((4, 32), jnp.int32))


def test_no_rows_are_no_panels() -> None:
    packed = repack(jnp.zeros((0, 64), jnp.float32))
    assert (packed.shape, packed.data.shape[0], packed.nbytes) == ((0, 64), 0, 0)


def test_floats_keep_their_dtype() -> None:
    for name, dtype in FLOATS.items():
        assert repack(jnp.zeros((4, 32), dtype)).format == name


def test_no_second_copy_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    zeros = repacking._aligned_zeros
    monkeypatch.setattr(repacking, "_aligned_zeros", lambda s: made.append(zeros(s)) or made[-1])
    packed = repack(random_weight("Q8_0", (4096, 256)))
    assert packed.data.unsafe_buffer_pointer() == made[0].ctypes.data


def test_pieces_that_are_done_are_all_rows_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight("Q4_1", (100, 64))
    want = repack(weight)
    monkeypatch.setattr(repacking, "_PIECE", 40 * 33)  # 33 rows: two panels
    done: list[np.ndarray] = []
    assert np.array_equal(repack(weight, done.append).data, want.data)
    assert [len(piece) for piece in done] == [32, 32, 32, 4]
    assert np.array_equal(np.concatenate(done), weight.data)


_LOAD = """
import sys, numpy as np
from infer.native.repack import repack
from infer.quant.blocks import FORMATS
from infer.quant.qarray import QArray
from infer.weights.gguf import GGUFFile
from infer.weights.gguf_writer import GGUFTensor, write_gguf
from infer.weights.gguf import GGUFFile
def kb(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith(name))
repack(QArray.create(np.zeros((16, 34), np.uint8), FORMATS["Q8_0"], (16, 32)))
file = GGUFFile.open(sys.argv[1])
before, most = kb("VmRSS"), kb("VmHWM")
raw = file.raw("w")
shape = file.tensors["w"].shape
packed = repack(QArray.create(raw, FORMATS["Q8_0"], shape), lambda x: file.release_view("w", x))
peak = kb("VmHWM")
assert peak > most
assert raw[-1].any()  # still readable
print((peak - before) * 1024 / raw.nbytes)
"""


def test_a_mapped_weight_is_never_in_memory_twice(tmp_path: Path) -> None:
    shape = (1 << 16, 2048)
    data = np.full((shape[0], shape[1] // 32 * 34), 1, np.uint8)  # 136 MB
    tensor = GGUFTensor(name="w", shape=shape, type_name="Q8_0", data=lambda: data)
    path = tmp_path / "w.gguf"
    write_gguf(path, {"general.architecture": "llama"}, [tensor])
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, str(path)], capture_output=True, text=True, check=True
    )
    # The weight itself, a piece of the file, and the rest of a huge page.
    assert 1 <= float(done.stdout) < 1.2, done.stderr


def test_a_file_that_is_cut_between_two_pieces_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repacking, "_PIECE", 1)
    data = np.ones((64, 34 * 32), np.uint8)
    tensor = GGUFTensor(name="w", shape=(64, 1024), type_name="Q8_0", data=lambda: data)
    path = tmp_path / "w.gguf"
    write_gguf(path, {"general.architecture": "llama"}, [tensor])
    with GGUFFile.open(path) as file:
        weight = QArray.create(file.raw("w"), BLOCKS["Q8_0"], (64, 1024))
        pieces = []

        def done(piece: np.ndarray) -> None:
            pieces.append(len(piece))
            if len(pieces) == 2:
                os.truncate(path, path.stat().st_size - 4096)
            file.release_view("w", piece)

        with pytest.raises(WeightFormatError, match="has been cut to"):
            repack(weight, done)
        assert pieces == [16, 16]


def test_data_that_does_not_match_its_shape_is_refused() -> None:
    q4_k = BLOCKS["Q4_K"]
    for data, shape in [
        (np.zeros((16, 144), np.uint8), (16, 1 << 22)),
        (np.zeros((16, 288), np.uint8), (64, 512)),
        (np.zeros((16, 288), np.int8), (16, 512)),
        (np.zeros((16, 0), np.uint8), (16, 32)),
    ]:
        with pytest.raises((ValueError, TypeError), match=r"Q4_K weight|data"):
            repack(QArray(data=data, format=q4_k, shape=shape))
