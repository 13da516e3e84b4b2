"""The GGUF writer: gguf-py reads its files, and so does our reader, which is another's oracle."""

import filecmp
import os
import struct
import tracemalloc

import gguf
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.quant.formats import GGML_TYPES
from infer.weights.gguf import GGUFFile
from infer.weights.gguf_metadata import VALUE_TYPES
from infer.weights.gguf_writer import GGUFTensor, metadata_of, tensors_of, write_gguf
from tests.cases import gguf_bytes as g
from tests.real_models import real_model_path

ARCH = {"general.architecture": "llama"}
ONE = GGUFTensor.of("w", np.arange(8, dtype=np.float32).reshape(2, 4))


def test_the_bytes_of_a_small_file(tmp_path):
    """Against the tests' own writer, which was written from the specification."""
    metadata = {**ARCH, "n": 7, "x": 0.5, "yes": True, "names": ["a", "ü"]}
    (path,) = write_gguf(tmp_path / "a.gguf", metadata, [ONE])
    pairs = [
        g.ARCHITECTURE,
        g.pair("n", g.UINT32, 7),
        g.pair("x", g.FLOAT32, 0.5),
        g.pair("yes", g.BOOL, 1),
        g.pair("names", g.ARRAY, (g.STRING, ["a", "ü"])),
    ]
    want = g.gguf([g.tensor_info("w", [4, 2], 0, 0)], struct.pack("<8f", *range(8)), pairs)
    assert path == tmp_path / "a.gguf" and path.read_bytes() == want


def test_integers_take_the_first_type_that_holds_them(tmp_path):
    metadata = {"a": 2**32 - 1, "b": -(2**31), "c": 2**32, "d": -(2**31) - 1, "e": np.uint8(1)}
    write_gguf(tmp_path / "a.gguf", metadata, [])
    m = GGUFFile.open(tmp_path / "a.gguf").metadata
    assert [m.type_of(k) for k in "abcde"] == ["uint32", "int32", "uint64", "int64", "uint8"]
    assert [m[k] for k in "abcd"] == [metadata[k] for k in "abcd"]


@pytest.mark.parametrize(
    "dtype", ["f4", "f2", "f8", "i1", "i2", "i4", "i8", ml_dtypes.bfloat16, ">f4"]
)
def test_gguf_py_reads_each_type_of_numbers(tmp_path, dtype):
    array = np.arange(-6, 6).reshape(3, 4).astype(dtype)
    arrays = {"a": array, "t": array.T}
    if array.dtype.name != "bfloat16":  # gguf-py reads no scalar of a type that it decodes
        arrays["s"] = np.array(array[0, 0])
    write_gguf(tmp_path / "a.gguf", ARCH, [GGUFTensor.of(n, a) for n, a in arrays.items()])
    theirs = {t.name: t for t in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    with GGUFFile.open(tmp_path / "a.gguf") as file:
        for name, want in arrays.items():
            assert theirs[name].tensor_type.name == file.tensors[name].type_name
            flat = want.astype(want.dtype.newbyteorder("<")).tobytes()
            assert theirs[name].data.tobytes() == flat and file.raw(name).tobytes() == flat
            np.testing.assert_array_equal(file.array(name, np.float64), want.astype(np.float64))
        assert list(reversed(theirs["a"].shape)) == [3, 4]


@pytest.mark.parametrize("kind", list(gguf.GGMLQuantizationType), ids=lambda k: k.name)
def test_gguf_py_reads_packed_bytes_of_every_type(tmp_path, kind):
    if kind.name == "Q8_1":
        pytest.skip("gguf-py has another size; no file holds it")
    format = GGML_TYPES[int(kind)]
    data = np.random.default_rng(5).integers(0, 256, (3, 2 * format.block_bytes), np.uint8)
    tensor = GGUFTensor(name="q", shape=(3, 2 * format.group), type_name=kind.name, data=data)
    write_gguf(tmp_path / "a.gguf", ARCH, [ONE, tensor])
    theirs = gguf.GGUFReader(tmp_path / "a.gguf").get_tensor(1)
    assert theirs.tensor_type == kind and theirs.data.tobytes() == data.tobytes()
    with GGUFFile.open(tmp_path / "a.gguf") as file:
        assert file.raw("q").tobytes() == data.tobytes()


def test_an_alignment_is_kept_and_said(tmp_path):
    two = [ONE, GGUFTensor.of("v", np.ones(3, np.float32))]
    write_gguf(tmp_path / "a.gguf", ARCH, two, alignment=128)
    theirs = gguf.GGUFReader(tmp_path / "a.gguf")
    assert theirs.alignment == 128 and [t.data_offset % 128 for t in theirs.tensors] == [0, 0]
    with GGUFFile.open(tmp_path / "a.gguf") as file:
        assert file.alignment == 128 and file.array("v").tolist() == [1, 1, 1]
        write_gguf(tmp_path / "b.gguf", metadata_of(file), tensors_of(file))  # taken from there
    assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()
    with pytest.raises(ValueError, match=r"alignment is 64, and the metadata say .* 128; give one"):
        write_gguf(tmp_path / "c.gguf", {"general.alignment": 128}, two, alignment=64)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"k": None}, "metadata 'k' is NoneType; give a bool"),
        ({"k": []}, "is list without items; give .* not empty"),
        ({"k": [1, 2]}, "is a list of int; give numbers as a numpy array"),
        ({"k": ["a", np.ones(2)]}, "is a list of an array of 1 axes and str"),
        ({"k": np.ones((2, 2))}, "is an array of 2 axes"),
        ({"k": 2**64}, "fits no integer of 64 bits"),
        ({"k": 1e300}, "too large for a float32; give it as np.float64"),
        ({"k": np.float16(1)}, "is float16, and GGUF has uint8"),
        ({"": 1}, "metadata key '' must be 1 to 65535 bytes"),
        ({"a\0": 1}, "without NUL"),
        ({"split.count": 2}, "have split.count, which the writer itself sets"),
        ({"general.alignment": "32"}, "general.alignment is str, must be an integer"),
        ({"general.alignment": 24}, "alignment is 24, must be a power of two"),
    ],
)
def test_metadata_that_gguf_does_not_have(tmp_path, metadata, message):
    with pytest.raises(ValueError, match=message):
        write_gguf(tmp_path / "a.gguf", metadata, [ONE])
    assert os.listdir(tmp_path) == []


def packed(name="w", shape=(32,), kind="Q8_0", data=None) -> GGUFTensor:
    data = np.zeros(34, np.uint8) if data is None else data
    return GGUFTensor(name=name, shape=shape, type_name=kind, data=data)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([ONE, ONE], "the tensor 'w' is there twice"),
        ([packed("x" * 64)], "must be 1 to 63 bytes"),
        ([packed(kind="Q9")], "has the type Q9; use one of F32"),
        ([packed(shape=(1, 1, 1, 1, 32))], "at most 4 axes"),
        ([packed(shape=(0, 32))], "none of 0"),
        ([packed(shape=(31,))], "row of 31 weights is no whole number of Q8_0 blocks"),
        (
            [ONE, packed(data=np.zeros(33, np.uint8))],
            "'w', Q8_0 .* takes 34 bytes, and its data has 33",
        ),
    ],
)
def test_tensors_that_gguf_does_not_have(tmp_path, tensors, message):
    if len(tensors) == 2 and tensors[1] is not ONE:
        tensors = [GGUFTensor.of("v", np.ones(3, np.float32)), tensors[1]]
    with pytest.raises(ValueError, match=message):
        write_gguf(tmp_path / "a.gguf", ARCH, tensors)
    assert os.listdir(tmp_path) == []


def test_arrays_without_a_tensor_type_are_refused():
    for dtype in (np.uint8, np.bool_, np.complex64, ml_dtypes.float8_e4m3fn):
        with pytest.raises(ValueError, match="and a GGUF file holds float32"):
            GGUFTensor.of("w", np.zeros(4, dtype))


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("max_part_bytes", [None, 40])
def test_nothing_half_written_is_left(tmp_path, error, max_part_bytes):
    """The second tensor fails; the file that was there before stays as it was."""

    def fail() -> np.ndarray:
        raise error

    old = tmp_path / "a.gguf"
    old.write_bytes(b"old")
    bad = packed("bad", data=fail)
    with pytest.raises(error):
        write_gguf(old, ARCH, [ONE, bad], max_part_bytes=max_part_bytes)
    assert os.listdir(tmp_path) == ["a.gguf"] and old.read_bytes() == b"old"


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_gguf(tmp_path / "no" / "a.gguf", ARCH, [ONE])


def test_a_file_can_be_written_over_itself(tmp_path):
    path = tmp_path / "a.gguf"
    write_gguf(path, ARCH, [ONE])
    before = path.read_bytes()
    with GGUFFile.open(path) as file:
        write_gguf(path, metadata_of(file), tensors_of(file))
        assert file.array("w").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]  # still the old mapping
    assert path.read_bytes() == before


def test_memory_is_that_of_one_tensor(tmp_path):
    size = 1 << 21

    def make() -> np.ndarray:
        return np.zeros(size, np.uint8)

    tensors = [
        GGUFTensor(name=f"w{i}", shape=(size,), type_name="I8", data=make) for i in range(16)
    ]
    seen = []
    tracemalloc.start()
    try:
        write_gguf(tmp_path / "a.gguf", ARCH, tensors, progress=lambda *a: seen.append(a))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * size
    assert seen[0] == (size, 16 * size) and seen[-1] == (16 * size, 16 * size)


def test_a_split_model_is_read_by_gguf_py_and_by_us(tmp_path):
    tensors = [GGUFTensor.of(f"t{i}", np.full((4, 4), i, np.float32)) for i in range(5)]
    metadata = {**ARCH, "names": ["a", "b"]}
    paths = write_gguf(tmp_path / "m.gguf", metadata, tensors, alignment=64, max_part_bytes=128)
    assert [p.name for p in paths] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert sorted(os.listdir(tmp_path)) == [p.name for p in paths]
    found = []
    for i, path in enumerate(paths):
        theirs = gguf.GGUFReader(path)
        fields = {k: f.contents() for k, f in theirs.fields.items()}
        assert (fields["split.no"], fields["split.count"]) == (i, 3)
        assert fields["split.tensors.count"] == 5 and theirs.alignment == 64
        assert ("names" in fields) == (i == 0)
        found += [(t.name, t.data.flat[0]) for t in theirs.tensors]
    assert found == [(f"t{i}", i) for i in range(5)]
    for path in paths:
        with GGUFFile.open(path) as file:
            assert file.paths == tuple(map(str, paths)) and file.path == str(paths[0])
            assert file.metadata["names"] == ["a", "b"]
            assert [int(file.array(f"t{i}")[0, 0]) for i in range(5)] == list(range(5))
            assert [t.part for t in file.tensors.values()] == [0, 0, 1, 1, 2]
    with GGUFFile.open(paths[1]) as file:  # and whole again
        (whole,) = write_gguf(tmp_path / "w.gguf", metadata_of(file), tensors_of(file))
    (direct,) = write_gguf(tmp_path / "d.gguf", metadata, tensors, alignment=64)
    assert whole.read_bytes() == direct.read_bytes()


def test_a_large_tensor_has_a_file_of_its_own(tmp_path):
    tensors = [
        GGUFTensor.of(n, np.zeros(k, np.float32)) for n, k in (("a", 8), ("b", 99), ("c", 8))
    ]
    assert len(write_gguf(tmp_path / "m.gguf", ARCH, tensors, max_part_bytes=64)) == 3
    assert write_gguf(tmp_path / "m.gguf", ARCH, tensors, max_part_bytes=10**6) == (
        tmp_path / "m.gguf",
    )
    with pytest.raises(ValueError, match="max_part_bytes is 0"):
        write_gguf(tmp_path / "m.gguf", ARCH, tensors, max_part_bytes=0)


# Random files.

NUMBER_DTYPES = [np.dtype(d) for name, d in VALUE_TYPES.values() if d and name != "bool"] + [
    np.dtype(bool)
]


@st.composite
def arrays(draw, max_size=5):
    dtype = draw(st.sampled_from(NUMBER_DTYPES))
    size = draw(st.integers(0, max_size))
    raw = draw(st.binary(min_size=size * dtype.itemsize, max_size=size * dtype.itemsize))
    array = np.frombuffer(raw, np.uint8)
    return (array & 1).astype(bool) if dtype.kind == "b" else array.view(dtype)


texts = st.text(max_size=8)
scalars = arrays(1).filter(len).map(lambda a: a[0])
trees = st.recursive(
    arrays() | st.lists(texts, min_size=1, max_size=4) | st.just(np.array([], "U")),
    lambda inner: st.lists(inner, min_size=1, max_size=3),
    max_leaves=6,
)
values = st.one_of(texts, st.booleans(), scalars, st.integers(-(2**63), 2**64 - 1), trees)
# Keys that the writer itself sets are refused; hypothesis finds their names in the sources.
OWN_KEYS = ("general.alignment", "split.no", "split.count", "split.tensors.count")
keys = st.text(min_size=1, max_size=12).filter(lambda t: "\0" not in t and t not in OWN_KEYS)
SOME_TYPES = [n for n, f in GGML_TYPES.items() if f.block_bytes < 120]


@st.composite
def tensors(draw):
    format = GGML_TYPES[draw(st.sampled_from(SOME_TYPES))]
    lead = draw(st.lists(st.integers(1, 3), max_size=3))
    shape = (*lead, format.group * draw(st.integers(1, 2)))
    num_bytes = int(np.prod(shape)) // format.group * format.block_bytes
    data = np.resize(np.frombuffer(draw(st.binary(min_size=1, max_size=40)), np.uint8), num_bytes)
    return shape, format.name, data


def assert_same(got, want):
    """Equal values, NaN payloads and all; a list of arrays item by item."""
    if isinstance(want, np.ndarray) and want.dtype.kind == "U":
        want = want.tolist()
    if isinstance(want, np.ndarray | np.generic):
        want = np.asarray(want).astype(want.dtype.newbyteorder("="))
        if isinstance(got, np.ndarray):
            assert got.dtype == want.dtype
        assert (
            np.asarray(got).astype(want.dtype).tobytes() == want.tobytes() or np.isnan(want).all()
        )
    elif isinstance(want, list):
        assert isinstance(got, list) and len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            assert_same(a, b)
    else:
        assert got == want and type(got) is type(want)


@given(
    metadata=st.dictionaries(keys, values, max_size=5),
    contents=st.dictionaries(keys.filter(lambda t: len(t.encode()) < 64), tensors(), max_size=4),
    alignment=st.sampled_from([None, 1, 8, 64]),
    max_part_bytes=st.none() | st.integers(1, 400),
)
@settings(max_examples=120, deadline=10_000)
def test_random_files_come_back(tmp_path_factory, metadata, contents, alignment, max_part_bytes):
    folder = tmp_path_factory.mktemp("w")
    try:
        written = [
            GGUFTensor(name=n, shape=s, type_name=t, data=d) for n, (s, t, d) in contents.items()
        ]
        options = {"alignment": alignment, "max_part_bytes": max_part_bytes}
        paths = write_gguf(folder / "a.gguf", metadata, written, **options)
        with GGUFFile.open(paths[-1]) as file:
            for key, want in metadata.items():
                assert_same(file.metadata[key], want)
            assert list(file.tensors) == list(contents)
            for name, (shape, kind, data) in contents.items():
                assert file.tensors[name].shape == shape and file.tensors[name].type_name == kind
                assert file.raw(name).tobytes() == data.tobytes()
            copies = write_gguf(folder / "b.gguf", metadata_of(file), tensors_of(file), **options)
        assert [p.read_bytes() for p in copies] == [p.read_bytes() for p in paths]
    finally:
        for path in folder.iterdir():
            path.unlink()


# Real models.


@pytest.mark.real
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_a_real_file_comes_back(tmp_path, name):
    """By its raw values, and by its decoded values encoded anew: the same file both times."""
    path = real_model_path(name)
    with GGUFFile.open(path) as file:
        typed = {key: _typed(file, key) for key in file.metadata}
        (anew,) = write_gguf(tmp_path / "a.gguf", typed, tensors_of(file))
        with GGUFFile.open(anew) as copy:
            assert list(copy.metadata) == list(file.metadata)
            assert all(copy.metadata.raw(k) == file.metadata.raw(k) for k in file.metadata)
            assert list(copy.tensors) == list(file.tensors)
            for tensor, info in file.tensors.items():
                other = copy.tensors[tensor]
                assert (info.shape, info.type_name) == (other.shape, other.type_name)
                assert np.array_equal(file.raw(tensor), copy.raw(tensor))
        (raw,) = write_gguf(tmp_path / "b.gguf", metadata_of(file), tensors_of(file))
    for copy in (raw, anew):  # byte for byte: these files are laid out as we lay ours out
        assert filecmp.cmp(copy, path, shallow=False)
        copy.unlink()


def _typed(file: GGUFFile, key: str):
    """The value as a caller would give it: a numpy scalar where the type matters."""
    value, kind = file.metadata[key], file.metadata.type_of(key)
    return np.dtype(kind).type(value) if type(value) in (int, float) else value
