"""Case L03: folders whose index lies, links, and files that are no safetensors."""

import json
import os
import pickle
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.errors import WeightFormatError
from infer.weights.shards import INDEX, SafetensorsFolder
from tests.cases.safetensors_bytes import entry, safetensors


def shard(value: float, *names: str) -> bytes:
    """Two numbers for each name."""
    names = names or ("x",)
    header = {name: entry("F32", [2], 8 * i, 8 * i + 8) for i, name in enumerate(names)}
    return safetensors(header, np.full(2 * len(names), value, np.float32).tobytes())


def build(base: Path, files: dict[str, bytes], weight_map: Any = None) -> Path:
    """A folder in `base`, beside a file that must never be read: its numbers are 666."""
    (base / "outside.safetensors").write_bytes(shard(666))
    folder = base / "folder"
    folder.mkdir()
    for name, data in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    if weight_map is not None:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(WeightFormatError) as error:
        SafetensorsFolder.open(folder)
    assert str(error.value).isprintable()
    return str(error.value)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("../outside.safetensors", "leaves the folder; name files inside it"),
        ("sub/../../outside.safetensors", "leaves the folder"),
        ("sub/../a.safetensors", "leaves the folder"),
        ("..\\outside.safetensors", "leaves the folder"),
        ("{base}/outside.safetensors", "leaves the folder"),
        ("a.safetensors\0", "no safetensors file"),
        ("a\0.safetensors", "leaves the folder"),
        ("absent.safetensors", "'absent.safetensors' is missing"),
        ("a.safetensors/b.safetensors", "is missing"),
        ("x" * 5000 + ".safetensors", "cannot be read"),
        ("sub.safetensors", "is no regular file"),
        ("weights.bin", "is no safetensors file: convert"),
        (7, "'x' is in 7, must be the name of a file"),
        (None, "'x' is in None"),
        (["a.safetensors"], "must be the name of a file"),
    ],
)
def test_names_that_lead_elsewhere(tmp_path: Path, target: Any, message: str) -> None:
    if isinstance(target, str):
        target = target.replace("{base}", str(tmp_path))
    files = {"a.safetensors": shard(1), "weights.bin": pickle.dumps([1.0])}
    folder = build(tmp_path, files, {"x": target})
    (folder / "sub.safetensors").mkdir()
    assert message in refusal(folder)


def test_links_stay_inside_the_folder(tmp_path: Path) -> None:
    folder = build(tmp_path, {"real.safetensors": shard(1)}, {"x": "a.safetensors"})
    (folder / "a.safetensors").symlink_to("../outside.safetensors")
    assert "is a link that leaves the folder" in refusal(folder)
    (folder / "a.safetensors").unlink()
    (folder / "a.safetensors").symlink_to("real.safetensors")
    assert SafetensorsFolder.open(folder).array("x").tolist() == [1, 1]
    (folder / "a.safetensors").unlink()
    (folder / "a.safetensors").symlink_to("a.safetensors")
    assert "a.safetensors" in refusal(folder)
    (tmp_path / "link").symlink_to(folder)  # the folder itself may be a link
    (folder / "a.safetensors").unlink()
    (folder / "a.safetensors").write_bytes(shard(2))
    assert SafetensorsFolder.open(tmp_path / "link").array("x").tolist() == [2, 2]


def test_an_index_behind_a_link_is_not_read(tmp_path: Path) -> None:
    folder = build(tmp_path, {"a.safetensors": shard(1)})
    (tmp_path / "index.json").write_text('{"weight_map": {"x": "a.safetensors"}}')
    (folder / INDEX).symlink_to(tmp_path / "index.json")
    assert "is a link that leaves the folder" in refusal(folder)


def test_a_hub_cache_links_into_its_own_blobs_only(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for blobs, value in ((repository / "blobs", 1), (tmp_path / "blobs", 2)):
        blobs.mkdir()
        (blobs / "digest").write_bytes(shard(value))
    link = snapshot / "model.safetensors"
    link.symlink_to("../../blobs/digest")
    assert SafetensorsFolder.open(snapshot).array("x").tolist() == [1, 1]
    link.unlink()
    link.symlink_to("../../../blobs/digest")  # shared by the repositories of this cache
    assert SafetensorsFolder.open(snapshot).array("x").tolist() == [2, 2]
    other = tmp_path / "models--org--other" / "blobs"
    other.mkdir(parents=True)
    (other / "digest").write_bytes(shard(666))
    link.unlink()
    link.symlink_to("../../../models--org--other/blobs/digest")
    assert "is a link that leaves the folder" in refusal(snapshot)


def test_every_problem_of_an_index_is_in_one_error(tmp_path: Path) -> None:
    folder = build(
        tmp_path,
        {
            "a.safetensors": shard(1, "x", "twice"),
            "b.safetensors": shard(1, "y", "twice", "stray"),
            "broken.safetensors": b"123",
        },
        {
            "x": "a.safetensors",
            "twice": "a.safetensors",
            "y": "a.safetensors",
            "b": "b.safetensors",
            "c": "c.safetensors",
            "d": 3,
            "e": "../outside.safetensors",
            "f": "broken.safetensors",
        },
    )
    message = refusal(folder)
    for piece in (
        "'twice' is in 'a.safetensors' and 'b.safetensors'",
        "'y' is not in 'a.safetensors', where the index has it",
        "'stray' is in 'b.safetensors' and not in the index",
        "'b' is not in 'b.safetensors'",
        "'c.safetensors' is missing",
        "'d' is in 3",
        "'../outside.safetensors' leaves the folder",
        "broken.safetensors: has 3 bytes",
    ):
        assert piece in message


def test_pickles_are_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle, "load", None)
    monkeypatch.setattr(pickle, "loads", None)
    only = tmp_path / "only"
    only.mkdir()
    (only / "pytorch_model.bin").write_bytes(pickle.dumps({"x": [666.0]}, protocol=2))
    assert "pickles are never read: convert it to safetensors" in refusal(only)
    (only / "model.safetensors").write_bytes(pickle.dumps({"x": [666.0]}, protocol=2) + b"x" * 99)
    assert "is a pickle" in refusal(only)
    (only / "model.safetensors").write_bytes(shard(1))
    assert SafetensorsFolder.open(only).array("x").tolist() == [1, 1]


def test_a_lone_file_of_any_name(tmp_path: Path) -> None:
    folder = build(tmp_path, {"consolidated.safetensors": shard(1)})
    assert SafetensorsFolder.open(folder).array("x").tolist() == [1, 1]
    (folder / "other.safetensors").write_bytes(shard(2))
    assert "has 2 safetensors files" in refusal(folder)


def test_no_weights_and_no_folder(tmp_path: Path) -> None:
    assert "give a folder in transformers' layout" in refusal(tmp_path)
    with pytest.raises(NotADirectoryError):
        SafetensorsFolder.open(tmp_path / "absent")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is no JSON"),
        (b"[]", "holds a list, must hold an object"),
        (b"\xff", "is not UTF-8"),
        (b"[" * 100_000, "is nested too deeply"),
        (b'{"weight_map": 3}', "has no weight_map object"),
        (b'{"weight_map": {"x": "a", "x": "b"}}', "has the key 'x' twice"),
        (b'{"weight_map": ' + b"9" * 10_000 + b"}", "is no JSON"),
    ],
)
def test_an_index_that_is_no_index(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / INDEX).write_bytes(text)
    assert message in refusal(tmp_path)


VALUES = st.sampled_from(
    ["a.safetensors", "b.safetensors", "../outside.safetensors", "/", ".", "", "a", 1, None, []]
)


@settings(max_examples=60, deadline=None)
@given(
    index=st.binary(max_size=40)
    | st.builds(
        lambda m: json.dumps({"weight_map": m}).encode(),
        st.dictionaries(st.sampled_from("xyz"), VALUES | st.text(max_size=4), max_size=3),
    )
)
def test_any_index(index: bytes) -> None:
    with tempfile.TemporaryDirectory() as base:
        files = {"a.safetensors": shard(1, "x", "y"), "b.safetensors": shard(1, "z")}
        folder = build(Path(base), files)
        (folder / INDEX).write_bytes(index)
        try:
            opened = SafetensorsFolder.open(folder)
        except WeightFormatError as error:
            assert str(error).isprintable()
            return
        assert all(opened.array(name)[0] == 1 for name in opened.tensors)
        assert os.path.commonpath([f.path for f in opened.files.values()] or [base])
