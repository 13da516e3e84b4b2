"""The safetensors reader on files that are broken or hostile: one line, quickly, little memory."""

import os
import time
import tracemalloc

import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.errors import WeightFormatError
from infer.weights.safetensors import SafetensorsFile
from tests.cases.hostile_safetensors import ACCEPTED, REFUSED
from tests.cases.safetensors_bytes import entry
from tests.cases.safetensors_bytes import safetensors as file_bytes

# What the reference library takes and we refuse, each for a reason of ours.
STRICTER = {
    "a name twice",  # it keeps the last
    "a name twice, once in escapes",
    "a dtype said twice",
    "a metadata key twice",
    "1000 axes",
    "a name of 70000 bytes",
    "a field too many",
    "a space in front",
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_sound_file_opens(tmp_path, name):
    data, values = ACCEPTED[name]
    path = tmp_path / "a.safetensors"
    path.write_bytes(data)
    with SafetensorsFile.open(path) as file:
        assert {n: file.array(n).tolist() for n in file.tensors} == values
    safetensors.deserialize(data)  # the reference library agrees


@pytest.mark.parametrize("name", REFUSED)
def test_a_broken_file_is_refused(tmp_path, name):
    data, piece = REFUSED[name]
    path = tmp_path / "a.safetensors"
    path.write_bytes(data)
    tracemalloc.start()
    started = time.process_time()
    try:
        with pytest.raises(WeightFormatError) as error:
            SafetensorsFile.open(path)
        seconds, peak = time.process_time() - started, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    message = str(error.value)
    assert piece in message
    assert message.startswith(f"{path}: ") and "; " in message
    assert message.isprintable() and len(message) < 500 + len(str(path))
    assert seconds < 1 and peak < 1 << 20


@pytest.mark.parametrize("name", [n for n in REFUSED if n not in STRICTER])
def test_the_reference_library_refuses_it_too(name):
    with pytest.raises(safetensors.SafetensorError):
        safetensors.deserialize(REFUSED[name][0])


@pytest.mark.parametrize(
    "header",
    [
        b'{"a":' + b"[" * 20_000_000,
        b'{"a":{' + b"1," * 10_000_000,
        b'{"' + b'\\"' * 10_000_000,
        b"{" + b" " * 20_000_000,
    ],
    ids=["deep", "wide", "escapes", "spaces"],
)
def test_a_long_header_costs_neither_time_nor_memory(header):
    data = file_bytes(header)
    tracemalloc.start()
    started = time.process_time()
    try:
        with pytest.raises(WeightFormatError):
            SafetensorsFile("m", data)
        seconds, peak = time.process_time() - started, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert seconds < 1 and peak < 1 << 24


def test_tensors_are_counted(monkeypatch):
    monkeypatch.setattr("infer.weights.safetensors.MAX_TENSORS", 50)
    many = lambda count: file_bytes({str(i): entry("U8", [0], 0, 0) for i in range(count)})
    assert len(SafetensorsFile("m", many(50)).tensors) == 50
    with pytest.raises(WeightFormatError, match="more than 50 tensors"):
        SafetensorsFile("m", many(51))


def test_a_missing_file_a_folder_and_a_pipe(tmp_path):
    with pytest.raises(FileNotFoundError):
        SafetensorsFile.open(tmp_path / "absent.safetensors")
    with pytest.raises(WeightFormatError, match="is a folder; give"):
        SafetensorsFile.open(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(WeightFormatError, match="is no regular file"):
        SafetensorsFile.open(tmp_path / "pipe")


SMALL = file_bytes(
    {
        "__metadata__": {"format": "pt"},
        "a": entry("F32", [2, 2], 0, 16),
        "b": entry("BF16", [2], 16, 20),
        "c": entry("F4", [2, 4], 20, 24),
    },
    bytes(range(24)),
)
HEADER_BYTES = len(SMALL) - 24


def read_everything(data: bytes) -> None:
    """Open and read all; WeightFormatError is the one exception that may come.  What opens here
    opens in the reference library as well.
    """
    try:
        file = SafetensorsFile("m", data)
    except WeightFormatError as error:
        assert str(error).isprintable()
        return
    safetensors.deserialize(data)
    for name, info in file.tensors.items():
        assert file.raw(name).nbytes == info.nbytes
        try:
            assert file.array(name).nbytes == info.nbytes
        except WeightFormatError as error:
            assert str(error).isprintable()


def test_cut_anywhere():
    read_everything(SMALL)
    for end in range(len(SMALL)):
        with pytest.raises(WeightFormatError):
            SafetensorsFile("m", SMALL[:end])


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


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda x: st.lists(x, max_size=4) | st.dictionaries(st.text(max_size=3), x, max_size=4),
    max_leaves=12,
)
NUMBER = st.integers(-1, 40) | st.sampled_from([2**31, 2**32, 2**63, 2**64])
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F4", "F6_E2M3", "I8", "BOOL", "F12"]),
        "shape": st.lists(NUMBER, max_size=3),
        "data_offsets": st.lists(NUMBER, min_size=2, max_size=2),
    }
)


@given(
    header=st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), ENTRY | JSON, max_size=3),
    data=st.binary(max_size=40),
)
@settings(max_examples=400, deadline=10_000)
def test_any_header(header, data):
    read_everything(file_bytes(header, data))


def test_every_byte_of_the_header_changed():
    for at in range(HEADER_BYTES):
        for byte in {0, 255, SMALL[at] ^ 1, ord('"')}:
            data = bytearray(SMALL)
            data[at] = byte
            read_everything(bytes(data))
