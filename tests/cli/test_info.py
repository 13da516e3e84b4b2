"""`infer info`, `infer models`, `infer pull`: numbers of stand-in files, refusals, no JAX."""

import dataclasses
import json
import os
import struct
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from infer.cli.info import printable
from infer.cli.main import main
from infer.weights import bundled
from tests.weights.test_summary import File, gemma3, smollm2


@pytest.fixture
def gguf(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Make a path whose header is that of a stand-in."""

    def make(file: File) -> str:
        path = tmp_path / "model.gguf"
        file = dataclasses.replace(file, paths=(str(path),))
        opener = types.SimpleNamespace(open=lambda path: file)
        module = types.SimpleNamespace(GGUFFile=opener)
        monkeypatch.setitem(sys.modules, "infer.weights.gguf", module)  # type: ignore[arg-type]
        path.write_bytes(bytes(100))
        return str(path)

    return make


def test_json_numbers(gguf: Any, capsys: pytest.CaptureFixture[str]):
    assert main(["info", gguf(smollm2()), "--chip", "rtx-5060-8gb", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    # Of 64 numbers in 8 and 4 bits, and a scale of 4 bytes.
    int8, int4 = 30 * 2 * 3 * (64 + 4), 30 * 2 * 3 * (32 + 4)
    quantised = {"int8": int8, "fp8": int8, "int4": int4}
    assert found["kv_bytes_per_token"] == {"bf16": 23040, "f32": 46080} | quantised
    assert found["kv_bytes_context"] == 8192 * 23040 == found["kv_bytes_context_windowed"]
    assert found["file_bytes"] == 100
    assert found["tensor_types"]["Q8_0"] == {
        "tensors": 1,
        "params": 28_311_552,
        "bytes": 30_081_024,
    }
    assert found["weight_bytes"] == 96_576_744
    chip, weights = found["chip"], 2 * found["num_params"]
    assert (chip["weights"], chip["weight_bytes"]) == ("bf16", weights)
    assert chip["kv_budget_bytes"] == 7_200_000_000 - weights
    assert chip["max_concurrency"] == (7_200_000_000 - weights) // (8192 * 23040) == 36
    assert chip["longest_context"] == 8192  # the memory would hold more than the model's context
    assert chip["decode_bound_packed_tokens_per_s"] == pytest.approx(448e9 / 96_576_744)
    assert chip["decode_bound_tokens_per_s"] == pytest.approx(448e9 / weights)
    at_context = 448e9 / (weights + 8192 * 23040)
    assert chip["decode_bound_tokens_per_s_at_context"] == pytest.approx(at_context)


def test_text(gguf: Any, capsys: pytest.CaptureFixture[str]):
    assert main(["info", gguf(gemma3()), "--chip", "h100-80gb", "--context", "4096"]) == 0
    out = capsys.readouterr().out
    assert "gemma3, 18 layers, width 640, feed-forward ?, 4 query and 1 key/value heads" in out
    assert (
        "18,432 bytes a token in bf16, 36,864 in f32, 9,360 in int8, 9,360 in fp8, 4,752 in int4"
        in out
    )
    # 4,096 tokens * 18,432 B in full; 3 full layers and 15 of 512 tokens, 1,024 B each, windowed.
    assert "75.5 MB for 4,096 tokens in bf16; 20.4 MB with sliding layers cut" in out
    assert "15 layers slide over 512 tokens" in out
    assert "on h100-80gb (80.0 GB, 3,350 GB/s), 10% kept free, bf16 weights, bf16 cache:" in out


def test_weights_too_large_for_the_chip(gguf: Any, capsys: pytest.CaptureFixture[str]):
    file = smollm2()
    big = file.tensors["blk.0.rest"]
    file.tensors["blk.0.rest"] = type(big)(big.name, (1 << 40,), "Q4_1", 10**11)
    assert main(["info", gguf(file), "--chip", "l4-24gb"]) == 0
    assert "the weights do not fit: 78.4 GB too large" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--chip", "tpu"], "no chip is called 'tpu'; known: h100-80gb"),
        (["--context", "0"], "Invalid value for '--context'"),
    ],
)
def test_bad_options(
    gguf: Any, capsys: pytest.CaptureFixture[str], options: list[str], message: str
):
    assert main(["info", gguf(smollm2()), *options]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


def test_container_without_a_decoder(gguf: Any, capsys: pytest.CaptureFixture[str]):
    path = gguf(File({"general.architecture": "clip"}))
    assert main(["info", path]) == 0
    assert "no decoder layers described" in capsys.readouterr().out
    assert main(["info", path, "--chip", "l4-24gb"]) == 2
    assert "cannot be planned" in capsys.readouterr().err


def test_names_cannot_steer_the_terminal(gguf: Any, capsys: pytest.CaptureFixture[str]):
    file = smollm2()
    file.metadata["general.name"] = "\x1b[2Jevil\n" + "x" * 1000
    assert main(["info", gguf(file)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert len(out.splitlines()[0]) < 400
    assert printable("a\x07b") == "a\N{REPLACEMENT CHARACTER}b"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm2-135m", "smollm2-135m is not in the cache; run `infer pull smollm2-135m`"),
        ("/no/such.gguf", "/no/such.gguf is no file and no known model; known: gemma3-270m, smo"),
        ("tests", "tests: has no config.json; give a folder in transformers' layout"),
    ],
)
def test_missing_files_end_quickly_without_jax(name: str, message: str, tmp_path: Path):
    refused_quickly(name, message, tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"GGML" + bytes(60), "starts with b'GGML'"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0) + bytes(60), "1152921504606846976 tensors"),
        # One key of 2**62 bytes.
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62) + bytes(60), "4611686018427387904 bytes"),
    ],
    ids=["empty", "magic", "tensors", "string"],
)
def test_hostile_files_end_quickly_without_jax(content: bytes, message: str, tmp_path: Path):
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    refused_quickly(str(path), message, tmp_path)


def refused_quickly(name: str, message: str, cache: Path) -> None:
    """In a process of its own: exit code 2, one line, no jax, under a second and 150 MB in all."""
    code = f"""
import resource, sys
from infer.cli.main import main
code = main(["info", {name!r}])
used = resource.getrusage(resource.RUSAGE_SELF)
# Not ru_maxrss: it starts with the parent's.
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if "VmHWM" in line)
print("jax" in sys.modules, used.ru_utime + used.ru_stime < 1, peak < 150_000)
sys.exit(code)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "INFER_CACHE": str(cache)},
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 2
    assert done.stdout == "False True True\n"
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_models(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("INFER_CACHE", str(tmp_path))
    path = tmp_path / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    path.parent.mkdir()
    with open(path, "wb") as file:
        file.truncate(98_362_432)
    assert main(["models", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["models"]}
    assert rows["smollm2-135m"]["cached"] == str(path)
    assert rows["gemma3-270m"]["cached"] is None
    assert rows["gemma3-270m"]["bytes"] == 253_113_024
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["smollm2-135m", "98.4", "MB", "yes", "Apache-2.0"]
    assert lines[2].split()[:4] == ["gemma3-270m", "253.1", "MB", "no"]


def test_pull_prints_the_path(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    seen: list[Any] = []

    def pull(name: str, *, progress: Any, verify: bool) -> Path:
        seen.append((name, progress, verify))
        return tmp_path / "x.gguf"

    monkeypatch.setattr(bundled, "pull", pull)
    assert main(["pull", "smollm2-135m", "--verify"]) == 0
    assert capsys.readouterr() == (f"{tmp_path / 'x.gguf'}\n", "")
    assert seen == [("smollm2-135m", None, True)]  # no bar where standard error is no terminal


def test_pull_of_an_unknown_name(capsys: pytest.CaptureFixture[str]):
    assert main(["pull", "gpt-9"]) == 2
    assert "no known model is called 'gpt-9'; known: gemma3-270m" in capsys.readouterr().err


@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "bf16", "params"),
    [("smollm2-135m", 23040, 134_515_008), ("gemma3-270m", 18432, 268_098_176)],
)
def test_real_files(name: str, bf16: int, params: int, capsys: pytest.CaptureFixture[str]):
    from tests.real_models import real_model_path

    pytest.importorskip("infer.weights.gguf")
    assert main(["info", str(real_model_path(name)), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kv_bytes_per_token"]["bf16"] == bf16
    assert found["num_params"] == params
