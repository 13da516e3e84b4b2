"""The GGUF reader on files that are broken or hostile: one line, quickly, and little memory."""

import os
import struct
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.errors import WeightFormatError
from infer.weights.gguf import GGUFFile
from tests.cases import gguf_bytes as g
from tests.cases.hostile_gguf import ACCEPTED, REFUSED


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_sound_file_opens(tmp_path, name):
    path = tmp_path / "a.gguf"
    path.write_bytes(ACCEPTED[name])
    with GGUFFile.open(path) as file:
        for tensor in file.tensors:
            assert file.array(tensor).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("name", REFUSED)
def test_a_broken_file_is_refused(tmp_path, name):
    data, piece = REFUSED[name]
    path = tmp_path / "a.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    started = time.process_time()
    try:
        with pytest.raises(WeightFormatError) as error:
            GGUFFile.open(path)
        seconds, peak = time.process_time() - started, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    message = str(error.value)
    assert piece in message
    assert message.startswith(f"{path}: ") and "; " in message
    assert message.isprintable() and len(message) < 400 + len(str(path))
    assert seconds < 1 and peak < 1 << 20


def test_a_long_run_of_arrays_is_refused_quickly():
    """A million empty arrays where two million are claimed: counted before they are read."""
    items = struct.pack("<IQ", g.UINT8, 0) * 1_000_000
    pair = g.string("k") + struct.pack("<IIQ", g.ARRAY, g.ARRAY, 2_000_000) + items
    with pytest.raises(WeightFormatError, match="claims 2000000 items"):
        GGUFFile("m", g.gguf(pairs=[pair]))


@pytest.mark.parametrize(
    ("kind", "count", "item_bytes"), [(g.STRING, 2**20, 8), (g.ARRAY, 2**13, 12)]
)
def test_strings_are_counted_over_the_whole_file(kind, count, item_bytes):
    """Arrays of empty strings, or of empty arrays: legal, and nothing but a waste of time."""
    head = struct.pack("<IIQ", g.ARRAY, kind, count)
    pairs = [g.string(f"k{i}") + head + b"\0" * (item_bytes * count) for i in range(5)]
    with pytest.raises(WeightFormatError, match="more than 4194304 strings with metadata 'k"):
        GGUFFile("m", g.gguf(pairs=pairs))


def test_a_missing_file_and_a_folder(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        GGUFFile.open(tmp_path / "absent.gguf")
    assert "absent.gguf" in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(WeightFormatError, match="is a folder; give the path of the"):
        GGUFFile.open(tmp_path)


def test_a_pipe_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(WeightFormatError, match="is no regular file"):
        GGUFFile.open(tmp_path / "pipe.gguf")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(g.gguf())
    path.chmod(0)
    with pytest.raises(PermissionError, match=r"a\.gguf"):
        GGUFFile.open(path)


def test_a_path_with_a_line_break_keeps_the_message_on_one_line(tmp_path):
    path = tmp_path / "a\nb.gguf"
    path.write_bytes(b"text")
    with pytest.raises(WeightFormatError) as error:
        GGUFFile.open(path)
    assert str(error.value).isprintable()


# Damage at random.

SMALL = g.gguf(
    [g.tensor_info("a", [32, 2], 8, 0), g.tensor_info("b", [4], 0, 96)],
    bytes(range(68)) + b"\0" * 28 + struct.pack("<4f", 1, 2, 3, 4),
    [
        g.ARCHITECTURE,
        g.pair("general.alignment", g.UINT32, 32),
        g.pair("tokens", g.ARRAY, (g.STRING, ["<s>", "a", "ü"])),
        g.pair("scores", g.ARRAY, (g.FLOAT32, [0.5, -1, 2])),
        g.pair("flags", g.ARRAY, (g.BOOL, [0, 1])),
        g.pair("deep", g.ARRAY, (g.ARRAY, [(g.UINT8, [1]), (g.STRING, ["x"])])),
        g.pair("f64", g.FLOAT64, 0.25),
    ],
)


def read_everything(data: bytes) -> None:
    """Open and read all; WeightFormatError is the one exception that may come."""
    try:
        file = GGUFFile("m", data)
    except WeightFormatError as error:
        assert str(error).isprintable()
        return
    for key in file.metadata:
        try:
            file.metadata[key]
        except WeightFormatError as error:
            assert str(error).isprintable()
    for name, info in file.tensors.items():
        assert file.raw(name).nbytes == info.nbytes
        try:
            assert file.array(name).shape == info.shape
        except WeightFormatError as error:
            assert str(error).isprintable()


def test_the_small_file_is_sound():
    file = GGUFFile("m", SMALL)
    assert {k: type(v) for k, v in file.metadata.items()} == {
        "general.architecture": str,
        "general.alignment": int,
        "tokens": list,
        "scores": np.ndarray,
        "flags": np.ndarray,
        "deep": list,
        "f64": float,
    }
    assert file.array("b").tolist() == [1, 2, 3, 4]


def test_cut_anywhere():
    for end in range(len(SMALL)):
        with pytest.raises(WeightFormatError):
            GGUFFile("m", SMALL[:end])


HEADER_BYTES = SMALL.index(bytes(range(68)))


@given(
    flips=st.lists(st.tuples(st.integers(0, HEADER_BYTES - 1), st.integers(0, 255)), max_size=4),
    end=st.integers(0, len(SMALL)) | st.just(len(SMALL)),
    tail=st.binary(max_size=16),
)
@settings(max_examples=400, deadline=10_000)
def test_bytes_changed_anywhere(flips, end, tail):
    data = bytearray(SMALL)
    for at, byte in flips:
        data[at] = byte
    read_everything(bytes(data[:end]) + tail)


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=10_000)
def test_any_bytes_after_the_magic(tail):
    read_everything(b"GGUF\3\0\0\0" + tail)


def test_every_byte_of_the_header_changed():
    for at in range(HEADER_BYTES):
        for byte in {0, 255, SMALL[at] ^ 1}:
            data = bytearray(SMALL)
            data[at] = byte
            read_everything(bytes(data))
