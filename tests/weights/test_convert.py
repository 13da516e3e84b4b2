"""`infer convert`: the same weights in another dtype or other files, and nothing half done."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from infer.cli.main import main
from infer.errors import ConfigError, WeightFormatError
from infer.weights.convert import convert
from infer.weights.folder import load_folder
from infer.weights.safetensors import SafetensorsFile
from infer.weights.shards import SafetensorsFolder
from tests.weights.hf_folders import CONFIGS, golden_weights, write


@pytest.fixture
def source(tmp_path: Path) -> Path:
    config = CONFIGS["llama"] | {"dtype": "float32"}
    folder = write(tmp_path / "source", config, golden_weights("llama"))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("x")
    (folder / "pytorch_model.bin").write_bytes(b"never copied")
    return folder


def test_a_folder_in_another_dtype(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "new" / "target"
    paths = convert(source, target, dtype="bfloat16", max_shard_bytes=20_000)
    assert len(paths) > 2
    names = {str(p.relative_to(target)) for p in target.rglob("*") if p.is_file()}
    assert names - {p.name for p in paths} == {
        "config.json", "tokenizer.json", "additional_chat_templates/rag.jinja",
    }  # fmt: skip
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"
    with SafetensorsFolder.open(target) as files:
        assert files.metadata == {"format": "pt"}
        for name, want in golden_weights("llama").items():
            np.testing.assert_array_equal(files.array(name), want.astype(ml_dtypes.bfloat16))
    assert load_folder(target).config == load_folder(source).config
    assert [p.name for p in tmp_path.iterdir()] and not list(target.parent.glob(".*"))


def test_as_they_are_the_bytes_stay(source: Path, tmp_path: Path) -> None:
    [path] = convert(source, tmp_path / "target")
    have = safetensors.numpy.load_file(path)
    want = golden_weights("llama")
    assert have.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(have[name], want[name])
    assert (tmp_path / "target" / "config.json").read_bytes() == (
        source / "config.json"
    ).read_bytes()


def test_one_file_and_integers_that_stay(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    safetensors.numpy.save_file({"i": np.int32([1]), "f": np.float64([0.1])}, file)
    [path] = convert(file, tmp_path / "target", dtype="float32")
    with SafetensorsFile.open(path) as opened:
        assert {n: t.dtype for n, t in opened.tensors.items()} == {"i": "I32", "f": "F32"}
        assert opened.array("f")[0] == np.float32(0.1)


def test_what_does_not_fit_is_refused_and_nothing_stays(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    safetensors.numpy.save_file({"f": np.float32([1e6, np.inf])}, file)
    with pytest.raises(WeightFormatError, match="'f' has values that float16 cannot hold"):
        convert(file, tmp_path / "target", dtype="float16")
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]
    convert(file, tmp_path / "target", dtype="bfloat16")  # infinity stays infinity
    with pytest.raises(ConfigError, match="is not empty; name a new folder"):
        convert(file, tmp_path / "target")
    with pytest.raises(ConfigError, match="weights can be float32, bfloat16, float16"):
        convert(file, tmp_path / "b", dtype="int8")


def test_quantised_weights_keep_their_dtype(source: Path, tmp_path: Path) -> None:
    config = CONFIGS["llama"] | {"quantization_config": {"quant_method": "awq"}}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightFormatError, match="by 'awq'"):
        convert(source, tmp_path / "a", dtype="bfloat16")
    assert convert(source, tmp_path / "b")


def test_the_command(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "target"
    assert main(["convert", str(source), str(target), "--dtype", "float16"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{target / 'model.safetensors'}\n"
    assert err == f"1 files in {target}\n"
    assert main(["info", str(target), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tensor_types"].keys() == {"F16"}
    assert found["file_bytes"] == (target / "model.safetensors").stat().st_size
    assert (found["num_layers"], found["tokenizer"]) == (3, "tokenizer.json")
    assert main(["convert", str(source), str(target)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "absent"), str(tmp_path / "c")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_info_of_an_architecture_that_is_not_run(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = CONFIGS["llama"] | {"architectures": ["OtherForCausalLM"]}
    (source / "config.json").write_text(json.dumps(config))
    assert main(["info", str(source), "--context", "10"]) == 0
    text = capsys.readouterr().out
    assert "OtherForCausalLM, 3 layers, width 32, feed-forward 48" in text
    (source / "config.json").write_text('{"architectures": ["OtherForCausalLM"]}')
    assert main(["info", str(source)]) == 0
    assert "no decoder layers described" in capsys.readouterr().out
