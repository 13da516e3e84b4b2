"""The safetensors reader and writer against the reference library."""

import json
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from infer.errors import WeightFormatError
from infer.weights.safetensors import DTYPES, SafetensorsFile
from infer.weights.safetensors_writer import Entry, write_file, write_folder
from infer.weights.shards import SafetensorsFolder
from tests.cases.safetensors_bytes import entry
from tests.cases.safetensors_bytes import safetensors as file_bytes

RNG = np.random.default_rng(0)
PLAIN = {
    name: RNG.integers(0, 2, (3, 5)).astype(dtype)
    if name == "BOOL"
    else RNG.integers(-9, 9, (3, 5)).astype(dtype)
    for name, (bits, dtype) in DTYPES.items()
    if bits >= 8 and not dtype.name.startswith("float8")
}


def test_what_the_reference_library_writes_is_read(tmp_path: Path) -> None:
    tensors = {n: a for n, a in PLAIN.items() if n not in ("BF16",)}
    safetensors.numpy.save_file(tensors, tmp_path / "a.safetensors", {"format": "np"})
    with SafetensorsFile.open(tmp_path / "a.safetensors") as file:
        assert file.metadata == {"format": "np"}
        for name, want in tensors.items():
            have = file.array(name)
            assert file.tensors[name].dtype == name
            assert not have.flags.writeable
            np.testing.assert_array_equal(have, want, strict=True)


def test_a_file_that_is_cut_while_it_is_open_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_file(path, {"a": np.zeros(3, np.float32), "b": np.ones(3, np.float32)}, {})
    with SafetensorsFile.open(path) as file:
        os.truncate(path, path.stat().st_size - 1)
        last = max(file.tensors.values(), key=lambda info: info.offset).name
        for name in ("a", "b"):
            if name == last:
                with pytest.raises(WeightFormatError, match="has been cut to"):
                    file.array(name)
            else:
                assert file.array(name).shape == (3,)


def test_every_dtype_goes_through_a_file(tmp_path: Path) -> None:
    tensors = {
        name: PLAIN[name]
        if name in PLAIN
        else RNG.integers(0, 256, (4, 8), np.uint8).view(dtype).reshape(4, 8)
        for name, (bits, dtype) in DTYPES.items()
        if bits >= 8
    }
    tensors |= {"empty": np.empty((0, 3), np.float32), "scalar": np.float32(7)}
    path = tmp_path / "a.safetensors"
    write_file(path, tensors, {"b": "2", "a": "1"})
    first = path.read_bytes()
    with SafetensorsFile.open(path) as file:
        assert file.metadata == {"a": "1", "b": "2"}
        assert set(file.tensors) == set(tensors)
        for name, want in tensors.items():
            np.testing.assert_array_equal(
                file.array(name).view(np.uint8) if want.ndim else file.array(name),
                want.view(np.uint8) if want.ndim else want,
            )
            assert file.tensors[name].offset % want.dtype.itemsize == 0
        assert min(t.offset for t in file.tensors.values()) % 64 == 0
    # The reference library reads the same shapes and bytes.
    for name, info in safetensors.deserialize(first):
        want = np.asarray(tensors[name])
        assert info["shape"] == list(want.shape)
        assert bytes(info["data"]) == want.tobytes()
    write_file(path, dict(reversed(tensors.items())), {"a": "1", "b": "2"})
    assert path.read_bytes() == first  # whatever the order
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


def test_sub_byte_elements_come_packed() -> None:
    data = bytes(range(12))
    file = SafetensorsFile(
        "m",
        file_bytes(
            {
                "a": entry("F4", [2, 4], 0, 4),
                "b": entry("F6_E2M3", [2, 4], 4, 10),
                "c": entry("F4", [4, 1], 10, 12),
            },
            data,
        ),
    )
    np.testing.assert_array_equal(file.array("a"), np.uint8([[0, 1], [2, 3]]))
    np.testing.assert_array_equal(file.array("b"), np.uint8([[4, 5, 6], [7, 8, 9]]))
    with pytest.raises(WeightFormatError, match=r"rows are no whole bytes; read.*raw\(\)"):
        file.array("c")
    assert file.raw("c").tolist() == [10, 11]


def test_low_precision_literals() -> None:
    """Bytes by hand: 1.0 and the largest number of each kind."""
    literals = {
        "F8_E4M3": (b"\x38\x7e", [1, 448]),
        "F8_E5M2": (b"\x3c\x7b", [1, 57344]),
        "F8_E4M3FNUZ": (b"\x40\x7f", [1, 240]),
        "F8_E5M2FNUZ": (b"\x40\x7f", [1, 57344]),
        "F8_E8M0": (b"\x7f\x80", [1, 2]),
        "BF16": (b"\x80\x3f\x00\x40", [1, 2]),
        "F16": (b"\x00\x3c\xff\x7b", [1, 65504]),
    }
    for dtype, (data, want) in literals.items():
        file = SafetensorsFile("m", file_bytes({"a": entry(dtype, [2], 0, len(data))}, data))
        assert file.array("a").astype(np.float32).tolist() == want, dtype


def test_views_need_no_alignment_and_outlive_the_file(tmp_path: Path) -> None:
    data = b"x" + np.float32([1, 2]).tobytes()
    path = tmp_path / "a.safetensors"
    path.write_bytes(file_bytes({"p": entry("U8", [1], 0, 1), "a": entry("F32", [2], 1, 9)}, data))
    with SafetensorsFile.open(path) as file:
        view = file.array("a")
        file.release("a")
    assert view.tolist() == [1, 2]
    with pytest.raises(ValueError, match="is closed"):
        file.array("a")
    with pytest.raises(WeightFormatError, match=r"no tensor 'q'; of its 2 tensors the first are"):
        file.array("q")


def test_a_writer_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_file(path, {"a": np.float32([1])})
    before = path.read_bytes()
    broken = Entry(dtype="F32", shape=(2,), read=lambda: np.float32([1]))
    with pytest.raises(ValueError, match=r"reads as float32 \[1\], and its entry says F32 \[2\]"):
        write_file(path, {"a": broken})
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(ValueError, match="cannot hold int4"):
        write_file(path, {"a": np.zeros(2, ml_dtypes.int4)})
    with pytest.raises(ValueError, match="cannot be called '__metadata__'"):
        write_file(path, {"__metadata__": np.float32([1])})


def test_shards_and_their_index(tmp_path: Path) -> None:
    tensors = {f"t{i}": np.full(n, i, np.float32) for i, n in enumerate((4, 2, 2, 9, 1))}
    alive = 0

    def read(array: np.ndarray) -> np.ndarray:
        nonlocal alive
        alive += 1
        return array

    entries = {
        n: Entry(dtype="F32", shape=a.shape, read=lambda a=a: read(a)) for n, a in tensors.items()
    }
    seen: list[tuple[int, int]] = []
    paths = write_folder(
        tmp_path,
        entries,
        {"format": "pt"},
        max_shard_bytes=24,
        progress=lambda *step: seen.append(step),
    )
    # 16 + 8 | 8 | 36, too large for any | 4
    names = [f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)]
    assert [p.name for p in paths] == [*names, "model.safetensors.index.json"]
    index = json.loads(paths[-1].read_text())
    assert index["metadata"] == {"total_size": 72}
    assert list(index["weight_map"].values()) == [names[i] for i in (0, 0, 1, 2, 3)]
    assert seen == [(16, 72), (24, 72), (32, 72), (68, 72), (72, 72)]
    assert alive == 5
    with SafetensorsFolder.open(tmp_path) as folder:
        for name, want in tensors.items():
            np.testing.assert_array_equal(folder.array(name), want)
    for path in paths[:-1]:
        assert safetensors.numpy.load_file(path)
    with pytest.raises(ValueError, match="already holds model-00001"):
        write_folder(tmp_path, tensors)
