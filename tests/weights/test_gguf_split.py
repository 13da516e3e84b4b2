"""Models in several files: any file opens all of them, or one error says what is wrong."""

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.cli.main import main
from infer.errors import WeightFormatError
from infer.weights.gguf import GGUFFile
from infer.weights.gguf_writer import metadata_of, tensors_of, write_gguf
from tests.cases import gguf_bytes as g

F32 = 0


def part(number: int, count: int, names: str, total: int | None = None, *, more=(), first=None):
    """Bytes of one part; each tensor holds eight times its own name."""
    pairs = [
        g.pair("split.no", g.UINT16, number),
        g.pair("split.count", g.UINT16, count),
        *more,
    ]
    if total is not None:
        pairs.append(g.pair("split.tensors.count", g.INT32, total))
    if number == 0 if first is None else first:
        pairs.append(g.ARCHITECTURE)
    infos = [g.tensor_info(n, [8], F32, 32 * i) for i, n in enumerate(names)]
    data = b"".join(np.full(8, ord(n), np.float32).tobytes() for n in names)
    return g.gguf(infos, data, pairs)


def put(folder: Path, *parts: bytes, stem="m", count=None) -> list[Path]:
    paths = []
    for i, data in enumerate(parts):
        paths.append(folder / f"{stem}-{i + 1:05d}-of-{count or len(parts):05d}.gguf")
        paths[-1].write_bytes(data)
    return paths


def refusal(path) -> str:
    with pytest.raises(WeightFormatError) as error:
        GGUFFile.open(path)
    assert str(error.value).isprintable()
    return str(error.value)


def test_any_part_opens_all(tmp_path, monkeypatch):
    paths = put(tmp_path, part(0, 3, "ab", 4), part(1, 3, "c", 4), part(2, 3, "d", 4))
    for path in paths:
        with GGUFFile.open(path) as file:
            assert list(file.tensors) == ["a", "b", "c", "d"]
            assert [file.array(n)[0] for n in "abcd"] == [ord(n) for n in "abcd"]
            assert file.metadata["general.architecture"] == "llama"
            assert file.path == str(paths[0]) and file.paths == tuple(map(str, paths))
            assert file.tensors["d"].part == 2
        with pytest.raises(ValueError, match="is closed"):
            file.raw("d")
    monkeypatch.chdir(tmp_path)
    assert len(GGUFFile.open(paths[1].name).tensors) == 4  # a path without a folder


def test_parts_that_gguf_py_wrote(tmp_path):
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama", split_max_tensors=2)
    for i in range(5):
        writer.add_tensor(f"t{i}", np.full((2, 4), i, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    paths = sorted(tmp_path.iterdir())
    assert len(paths) == 3
    with GGUFFile.open(paths[2]) as file:
        assert [int(file.array(f"t{i}")[1, 3]) for i in range(5)] == list(range(5))


def test_missing_parts_are_listed(tmp_path):
    paths = put(tmp_path, *[part(i, 4, "abcd"[i], 4) for i in range(4)])
    paths[0].unlink()
    paths[3].unlink()
    assert refusal(paths[1]) == (
        f"{paths[1]}: is part 2 of 4, and missing beside it are 'm-00001-of-00004.gguf',"
        " 'm-00004-of-00004.gguf'; download them into the same folder"
    )


def test_a_long_list_of_missing_parts_is_cut(tmp_path):
    (path,) = put(tmp_path, part(0, 65535, "a"), count=65535)
    message = refusal(path)
    assert message.endswith("and 65526 more; download them into the same folder")
    assert len(message) < 500 + len(str(path))


def test_a_part_under_another_name_is_told_its_own(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(part(1, 3, "a"))
    assert (
        "is part 2 of 3 by its metadata, and its name is 'model.gguf'; name it"
        " 'model-00002-of-00003.gguf'" in refusal(path)
    )
    for name in ("x-00001-of-00003.gguf", "x-00002-of-00004.gguf"):
        path = tmp_path / name
        path.write_bytes(part(1, 3, "a"))
        assert f"its name is '{name}'; name it 'x-00002-of-00003.gguf'" in refusal(path)


@pytest.mark.parametrize(
    ("second", "piece"),
    [
        (part(0, 2, "b", 2, first=False), "'m-00002-of-00002.gguf' has split.no 0, must be 1"),
        (part(1, 3, "b", 2), "has split.count 3, must be 2"),
        (part(1, 2, "b", 3), "has split.tensors.count 3, and the first part 2"),
        (part(1, 2, "bc", 2), "split.tensors.count is 2, and the parts hold 3"),
        (part(1, 2, "", 2), "split.tensors.count is 2, and the parts hold 1"),
        (part(1, 2, "a", 2), "tensor 'a' is in 'm-00001-of-00002.gguf' and in 'm-00002-of"),
        (g.gguf([g.tensor_info("b", [8], F32, 0)], b"\0" * 32, []), "has split.no absent, must"),
        (
            part(1, 2, "b", 2, more=[g.pair("general.architecture", g.STRING, "qwen2")]),
            "has general.architecture 'qwen2', and the first part 'llama'",
        ),
    ],
)
def test_parts_that_do_not_belong_together(tmp_path, second, piece):
    first, _ = put(tmp_path, part(0, 2, "a", 2), second)
    message = refusal(first)
    assert message.startswith(f"{first}: the 2 parts are not of one model: ") and piece in message
    assert message.endswith("; download all parts again from one source")


def test_all_problems_are_in_one_error(tmp_path):
    first, *_ = put(tmp_path, part(0, 3, "a", 9), part(0, 3, "a", 9), part(2, 4, "a", 9))
    message = refusal(first)
    for piece in ("has split.no 0, must be 1", "has split.count 4", "tensor 'a' is in", "hold 3"):
        assert piece in message


def test_a_broken_part_is_named(tmp_path):
    first, second = put(tmp_path, part(0, 2, "a", 2), b"GGUF")
    assert refusal(first).startswith(f"{second}: ")
    second.unlink()
    second.mkdir()
    assert "00002-of-00002.gguf: is a folder" in refusal(first)


@pytest.mark.parametrize(
    ("kind", "value", "piece"),
    [
        (g.STRING, "2", "split.count is '2', must be an integer"),
        (g.INT32, -1, "split.count is -1, must be 0 to 65535"),
        (g.UINT64, 2**63, "split.count is 9223372036854775808, must be 0"),
        (g.ARRAY, (g.INT32, [2]), "split.count is array"),
    ],
)
def test_a_count_that_cannot_be(tmp_path, kind, value, piece):
    path = tmp_path / "m-00001-of-00002.gguf"
    path.write_bytes(g.gguf(pairs=[g.pair("split.count", kind, value)]))
    assert piece in refusal(path)


@pytest.mark.parametrize("number", [-1, 2, 70000])
def test_a_number_that_cannot_be(tmp_path, number):
    path = tmp_path / "m-00001-of-00002.gguf"
    pairs = [g.pair("split.count", g.INT32, 2), g.pair("split.no", g.INT32, number)]
    path.write_bytes(g.gguf(pairs=pairs))
    assert f"split.no is {number}, must be 0 to 1" in refusal(path)


@pytest.mark.parametrize("count", [0, 1])
def test_a_merged_file_is_whole(tmp_path, count):
    path = tmp_path / "any name"
    path.write_bytes(part(0, count, "ab", 2))
    with GGUFFile.open(path) as file:
        assert list(file.tensors) == ["a", "b"] and file.paths == (str(path),)


def test_info_and_load_take_a_split_model(tmp_path, capsys):
    import jax

    from infer.config import ModelConfig
    from infer.models.params import random_params
    from infer.weights.load import load_gguf
    from tests.weights.test_load import _config, _write

    twin = random_params(_config("llama"), seed=3)
    assert isinstance(twin.config, ModelConfig)
    whole = _write(tmp_path / "whole.gguf", twin)
    with GGUFFile.open(whole) as file:
        size = sum(t.nbytes for t in file.tensors.values())
        paths = write_gguf(
            tmp_path / "m.gguf", metadata_of(file), tensors_of(file), max_part_bytes=size // 4
        )
    assert len(paths) >= 4
    for have, want in zip(
        jax.tree.leaves(load_gguf(paths[2])), jax.tree.leaves(load_gguf(whole)), strict=True
    ):
        np.testing.assert_array_equal(have, want)
    reports = []
    for path in (whole, paths[-1]):
        main(["info", str(path), "--json"])
        reports.append(json.loads(capsys.readouterr().out))
    differ = {"model", "file", "num_files", "file_bytes"}
    assert {k for k in reports[0] if reports[0][k] != reports[1][k]} == differ
    assert reports[1]["num_files"] == len(paths) and reports[0]["num_files"] == 1
    assert reports[1]["file_bytes"] == sum(p.stat().st_size for p in paths)
    main(["info", str(paths[0])])
    assert f"MB as in the {len(paths)} files" in capsys.readouterr().out


# Damage at random.

HEADS = [part(i, 3, "abc"[i], 3) for i in range(3)]


@given(
    order=st.lists(st.integers(0, 2), min_size=1, max_size=3),
    flips=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 400), st.integers(0, 255)), max_size=3
    ),
    opened=st.integers(0, 2),
)
@settings(max_examples=150, deadline=10_000)
def test_parts_changed_anywhere(tmp_path_factory, order, flips, opened):
    """Parts swapped, left out, repeated and damaged: it opens, or WeightFormatError says why."""
    parts = [bytearray(HEADS[i]) for i in order]
    for which, at, byte in flips:
        if which < len(parts) and at < len(parts[which]):
            parts[which][at] = byte
    folder = tmp_path_factory.mktemp("s")
    paths = put(folder, *map(bytes, parts), count=3)
    try:
        with GGUFFile.open(paths[min(opened, len(paths) - 1)]) as file:
            for name, info in file.tensors.items():
                assert file.raw(name).nbytes == info.nbytes
            assert flips or order == [0, 1, 2]
    except WeightFormatError as error:
        assert str(error).isprintable()
        assert flips or order != [0, 1, 2]
    finally:
        shutil.rmtree(folder)
