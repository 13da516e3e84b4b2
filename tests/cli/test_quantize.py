"""`infer quantize`, `infer generate --quantize` and `infer info` of what they make, on a tiny
model.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import infer
from infer import fingerprint, quant
from infer.cli import loading
from infer.cli.main import main
from infer.models import decoder
from infer.quant.qarray import QArray
from infer.weights.safetensors import SafetensorsFile
from tests.cli.conftest import Terminal
from tests.models import tiny_folder

TEXT = "The quick brown fox jumps over the lazy dog, again and again. " * 40


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder.write(tmp_path_factory.mktemp("quantize") / "source")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "calibration.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFER_NO_COMPILE_CACHE", "1")


def test_a_calibrated_method_from_text_to_folder(
    source: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "m"
    asked = ["--method", "gptq", "--group-size", "16", "--act-order", "--calibration", str(text)]
    asked += ["--calibration-tokens", "512", "--seq-len", "256", "--out", str(out), "--json"]
    assert main(["quantize", str(source), *asked]) == 0
    printed = capsys.readouterr()
    assert printed.err.splitlines() == [
        "infer: 2 calibration sequences; 64 or more are usual, and fewer may give a worse model"
        " than no calibration",
        "infer: quantising 2 layers",
    ]
    found = json.loads(printed.out)
    assert found["stayed"] == {"float32": ["embed"]}
    # 32 x 32, 16 x 32 twice, 32 x 32, 48 x 32 twice, 32 x 48: the last has a column order of 48
    # inputs, the others one of 32.
    weights = 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32)
    size = weights // 2 + 2 * weights // 16 + 2 * 4 * (6 * 32 + 48)
    assert found["packed"] == {
        "INT4-G16-ORDERED": {"matrices": 14, "weights": weights, "bytes": size}
    }
    assert found["bits_per_weight"] == pytest.approx(8 * size / weights)
    assert found["calibration"] == {
        "of": "text",
        "sha256": hashlib.sha256(TEXT.encode()).hexdigest(),
        "num_tokens": 512,
        "num_sequences": 2,
        "text": "calibration.txt",
        "method": repr(quant.GPTQ(group_size=16, act_order=True)),
    }
    assert found["file_bytes"] == (out / "model.safetensors").stat().st_size
    assert found["bytes_after"] < found["bytes_before"]
    assert found["peak_memory_bytes"] > 10e6
    params = infer.load(out).params
    assert isinstance(params.layers[1].down, QArray) and params.layers[1].down.perm is not None
    assert sum(leaf.nbytes for leaf in _leaves(params)) == found["bytes_after"]
    with SafetensorsFile.open(out / "model.safetensors") as file:
        mark = fingerprint.Fingerprint.from_json(file.metadata[fingerprint.METADATA_KEY])
    assert fingerprint.share_in(fingerprint.text_hashes(TEXT), mark) > 0.99
    assert fingerprint.share_in(fingerprint.text_hashes(TEXT[::-1]), mark) == 0

    assert main(["info", str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["tensor_types"]["INT4-G16-ORDERED"] == {
        "tensors": 14, "params": weights, "bytes": size,
    }  # fmt: skip
    assert said["quantisation"]["bits_per_weight"] == {"INT4-G16-ORDERED": found["bits_per_weight"]}
    assert said["quantisation"]["calibration"] == found["calibration"]
    assert said["quantisation"]["stayed"] == {"model.embed_tokens.weight": "F32"}
    assert said["quantisation"]["formats"]["INT4-G16-ORDERED"]["group"] == 16
    assert said["num_params"] == found["num_weights"]
    assert main(["info", str(out)]) == 0
    words = capsys.readouterr().out
    assert "INT4-G16-ORDERED: 4-bit integers, a float16 scale for each 16 weights" in words
    assert "stays          model.embed_tokens.weight (F32)" in words
    digest = found["calibration"]["sha256"]
    assert f"calibration.txt, 512 tokens in 2 sequences, sha256 of the text {digest}" in words
    assert "calibrated     GPTQ(bits=4, group_size=16" in words
    assert words.splitlines()[0] == str(out)
    # What is loaded and saved again keeps the record and the fingerprint.
    loaded = infer.load(out)
    infer.save(loaded, tmp_path / "again")
    again = infer.load(tmp_path / "again").calibration
    assert again == loaded.calibration and again.to_json() == found["calibration"]
    np.testing.assert_array_equal(again.fingerprint.hashes, mark.hashes)

    assert main(["generate", "ab", "--model", str(out), "--max-tokens", "2", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["outputs"][0]["token_ids"]) == 2
    # Once more over it: refused before anything is loaded.
    assert main(["quantize", str(source), *asked]) == 2
    assert "is not empty; name a new folder" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["quarot", "spinquant", "values"])
def test_a_turned_model_from_text_to_folder(
    kind: str, source: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "m"
    asked = ["--method", "rtn", "--bits", "8", "--group-size", "16", "--rotation", kind]
    if kind == "spinquant":
        asked += ["--rotation-steps", "2", "--calibration", str(text), "--seq-len", "32"]
    assert main(["quantize", str(source), *asked, "--out", str(out), "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["rotation"] == kind
    assert sorted(found["packed"]) == ["INT8-G16", "INT8-G16-H48"]
    if kind == "spinquant":
        assert "a token's loss was" in printed.err
        assert found["calibration"]["method"] == "SpinQuant"
    loaded, want = infer.load(out), infer.load(source)
    assert loaded.params.config.tied_embeddings == (kind == "values")
    ids = jnp.asarray([[3, 14, 15, 92, 65, 35]], jnp.int32)
    have, want = (np.asarray(decoder.forward(m.params, ids)) for m in (loaded, want))
    real = np.isfinite(want)
    assert np.abs(have[real] - want[real]).max() < 0.05 * np.abs(want[real]).max()


def _leaves(params: Any) -> list[Any]:
    import jax

    return jax.tree.leaves(params)


def test_a_recipe_for_people(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    recipe = tmp_path / "r.json"
    recipe.write_text(
        '{"layers.0.*": null, "layers.*.down": {"method": "mxfp4"},'
        ' "layers.*": {"method": "rtn", "bits": 8, "group_size": "channel"}}'
    )
    # 48 inputs hold no 32: nothing is written.
    assert main(["quantize", str(source), "--recipe", str(recipe), "--out", "x"]) == 2
    assert "layers.1.down" in capsys.readouterr().err
    recipe.write_text(recipe.read_text().replace("mxfp4", "nvfp4"))
    import sys

    monkeypatch.setattr(sys, "stderr", Terminal(sys.stderr))
    out = tmp_path / "m"
    assert main(["quantize", str(source), "--recipe", str(recipe), "--out", str(out)]) == 0
    words = capsys.readouterr().out
    assert "NVFP4            1 matrices, 1,536 weights, 0.0 MB, 4.521 bits a weight" in words
    assert "stays float32    embed, layers.0.*" in words
    assert "calibration" not in words and "peak memory" in words
    assert main(["info", str(out)]) == 0
    words = capsys.readouterr().out
    assert "stays          model.layers.0.mlp.down_proj.weight (F32)" in words
    assert "calibration    none recorded" in words


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one of --method and --recipe"),
        (["--method", "rtn", "--recipe", "r"], "give one of --method and --recipe"),
        (["--recipe", "r", "--bits", "4"], "--bits goes with --method"),
        (["--method", "q4_0"], "method is 'q4_0'; use rtn, gptq"),
        (["--method", "nf4", "--act-order"], "act_order does not go with nf4"),
        (["--method", "rtn", "--asymmetric", "--convention", "full"], "this has zero points"),
        (["--method", "rtn", "--group-size", "some"], "group_size is 'some'; use a number"),
        (["--method", "gptq"], "GPTQ needs calibration text"),
        (["--method", "rtn", "--calibration", "f"], "--calibration is for gptq, awq, smoothq"),
        (["--method", "rtn", "--seq-len", "64"], "--seq-len is for a calibration text"),
        (["--method", "awq", "--calibration", "absent.txt"], "absent.txt"),
        (["--method", "rtn", "--rotation", "r5"], "--rotation is 'r5'; use quarot, spinquant"),
        (["--method", "rtn", "--rotation-steps", "9"], "--rotation-steps is for --rotation spinq"),
        (["--method", "rtn", "--rotation", "spinquant"], "SpinQuant needs calibration text"),
        (["--method", "rtn", "--hadamard", "half"], "hadamard is 'half'; use a number"),
    ],
)
def test_what_is_refused_before_anything_is_loaded(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "m"
    assert main(["quantize", "no such model", "--out", str(out), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_too_little_text_and_no_text(
    source: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask = ["quantize", str(source), "--method", "awq", "--group-size", "16"]
    ask += ["--out", str(tmp_path / "m"), "--calibration", str(text)]
    text.write_text("short")
    assert main(ask) == 2
    assert "calibration.txt has 5 tokens, 0 sequences of 512" in capsys.readouterr().err
    text.write_bytes(b"ab\xff")
    assert main(ask) == 2
    assert "is not UTF-8 at byte 2" in capsys.readouterr().err
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "rtn", "--group-size", "64"], "group_size 64 does not divide the width 32"),
        (["--recipe", '{"layers.9.*": {"method": "rtn"}}'], "'layers.9.*' matches no matrix of"),
        (["--recipe", '{"*": {"method": "rtn", "bit": 4}}'], "'*': bit does not go with rtn, wh"),
        (["--recipe", '{"*": null}'], "every matrix stays as it is; give at least one a method"),
        (["--method", "gptq", "--group-size", "16", "--damping", "1e-15"], "stays singular with"),
    ],
)
def test_what_the_model_cannot_be_leaves_nothing(
    arguments: list[str],
    message: str,
    source: Path,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if arguments[0] == "--recipe":
        (tmp_path / "r.json").write_text(arguments[1])
        arguments = ["--recipe", str(tmp_path / "r.json")]
    if "gptq" in arguments:
        text.write_text("a" * 4000)
        arguments = [*arguments, "--calibration", str(text), "--seq-len", "64"]
    before = sorted(tmp_path.iterdir())
    assert main(["quantize", str(source), *arguments, "--out", str(tmp_path / "new" / "m")]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.out == ""
    assert sorted(tmp_path.iterdir()) == before


def test_weights_that_are_no_numbers(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = infer.load(source)
    layer = model.params.layers[1]
    bad = dataclasses.replace(layer, up=layer.up.at[3, 4].set(jnp.nan))
    params = dataclasses.replace(model.params, layers=(model.params.layers[0], bad))
    infer.save(dataclasses.replace(model, params=params), tmp_path / "bad")
    ask = ["quantize", str(tmp_path / "bad"), "--method", "rtn", "--group-size", "16"]
    assert main([*ask, "--out", str(tmp_path / "m")]) == 2
    assert "layers.1.up has weights that are NaN or infinite" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad"]


def test_a_native_product_that_is_asked_for_and_not_there(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "m")
    ask = ["--method", "rtn", "--group-size", "8", "--out", out]
    assert main(["quantize", str(source), *ask]) == 0
    capsys.readouterr()
    ask = ["generate", "ab", "--model", out, "--max-tokens", "1"]
    assert main([*ask, "--implementation", "native"]) == 2
    err = capsys.readouterr().err
    assert "linear in native: the weights are INT4-G8" in err and "leave" in err
    assert main(ask) == 0


def test_generate_quantises_after_loading(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded, _ = loading.load_model(str(source), quantize="rtn4-g8")
    assert loaded.params.layers[0].q.format.name == "INT4-G8"
    assert "INT4-G8, 6.000 bits a weight in the layers; 0.1 MB before" in capsys.readouterr().err
    ask = ["generate", "a", "--model", str(source), "--max-tokens", "1", "--quantize"]
    assert main([*ask, "gptq"]) == 2
    assert "infer quantize MODEL --method gptq --calibration FILE" in capsys.readouterr().err
    assert main([*ask, "q4_0"]) == 2
    assert "is no method without calibration" in capsys.readouterr().err
    assert main([*ask, "nf4", "--packed"]) == 2
    assert "--packed keeps the file's own weights" in capsys.readouterr().err
    assert main([*ask, "llm-int8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outputs"][0]["num_output_tokens"] == 1
