"""`infer eval`: what it refuses, what it prints, its exit codes."""

import json
from pathlib import Path
from typing import Any

import pytest

from infer.cli import eval_report
from infer.cli.main import main
from infer.eval import measures, scoring
from tests.models import tiny_folder

QUICK = ("--context", "48", "--windows", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_folder.write(tmp_path_factory.mktemp("m") / "tiny"))


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFER_NO_COMPILE_CACHE", "1")


def _json(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert main(["eval", *arguments, "--json"]) == code
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["perplexity", "m", "--text", "klingon"],
            "no file and no built-in text; those are en, te",
        ),
        (["perplexity", "m", "--text", "en", "--text", "en"], "give each text once"),
        (["perplexity"], "Missing argument 'M'"),
        (["divergence", "m"], "Missing argument 'M2'"),
        (["tasks", "m"], "Missing option '--task'"),
        (["tasks", "m", "--task", "chess"], "neither needle nor arithmetic nor a file"),
        (["tasks", "m", "--task", "needle", "--shots", "2"], "--shots does not go with --task"),
        (["tasks", "m", "--task", "needle", "--depths", "2"], "give numbers from 0 to 1"),
        (["tasks", "m", "--task", "arithmetic", "--items", "0"], "count is 0; it is from 1"),
        (["tasks", "m", "--task", "arithmetic", "--normalize"], "--normalize does not go with"),
        (["perplexity", "m", "--seed", "-1"], "seed is -1; give an integer from 0 on"),
        (["tasks", "m", "--task", "arithmetic", "--seed", "-1"], "seed is -1; give an integer"),
        (["compare", "m", "n", "--context", "2"], "the context is 2 tokens; give at least 4"),
        (["divergence", "m", "n", "--windows", "0"], "windows is 0; give at least 1"),
        (["perplexity", "m", "--scored", "third"], "there are second_half, all"),
        (["perplexity", "m", "--implementation", "cuda"], "implementation is 'cuda'"),
        (["compare", "m", "n", "--dtype", "int8"], "dtype is int8; weights and activations can"),
        (["perplexity", "m", "--kv-dtype", "int3"], "kv_dtype is 'int3'; there are"),
        (["divergence", "m", "n", "--kv-dtype2", "int3"], "kv_dtype is 'int3'; there are"),
        (["tasks", "m", "--task", "needle", "--items", "0"], "count is 0; give 1 to"),
        (["tasks", "m", "--task", "needle", "--context", "9"], "context of 9 tokens has no room"),
        (["tasks", "m", "--task", "arithmetic", "--packed2"], "--packed2 is of M2, and one model"),
        ([], "Missing command"),
    ],
)
def test_bad_options(
    arguments: list[str], message: str, model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err
    assert model.loads == []  # said before anything is loaded


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--context", "100000"), "the model's context is 512"),
        (("--context", "2"), "give at least 4"),
        (("--windows", "0"), "give at least 1"),
        (("--scored", "third"), "there are second_half, all"),
        (("--implementation", "cuda"), "implementation is 'cuda'"),
    ],
)
def test_what_a_model_cannot_do_is_one_line(
    folder: str, options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "perplexity", folder, *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and "Traceback" not in err


def test_perplexity(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ("--text", "en", "--text", "te")
    found = _json(capsys, "perplexity", folder, *texts, *QUICK)
    assert [x["name"] for x in found["texts"]] == ["en", "te"]
    assert found["overall"]["num_windows"] == 4
    # Random weights: about as many choices as there are tokens.
    assert 100 < found["overall"]["perplexity"]["value"] < 1000
    assert main(["eval", "perplexity", folder, *texts, *QUICK]) == 0
    text = capsys.readouterr().out
    assert "windows of 48 tokens, the second half scored (23)" in text
    assert "too narrow: en (2), te (2)" in text
    assert [line.split()[0] for line in text.split("\n")[2:5]] == ["en", "te", "all"]


def test_divergence_with_its_control(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = _json(capsys, "divergence", folder, folder, *QUICK, "--control")
    assert found["overall"]["kl"]["max"] == 0.0
    assert found["overall"]["ratio"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    (control,) = found["controls"]
    assert control == {"num_windows": 2, "ratio": 1.0, "kl_max": 0.0, "exact": True}
    assert main(["eval", "divergence", folder, folder, *QUICK, "--control"]) == 0
    text = capsys.readouterr().out
    assert "identical" in text and "control, 2 windows: ratio 1.0, largest KL 0.0: exact" in text


def test_a_control_has_the_cache_of_what_it_controls(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    real = measures.divergence

    def divergence(*given: Any, **options: Any) -> Any:
        seen.append(options["kv_dtype"])
        return real(*given, **options)

    monkeypatch.setattr(measures, "divergence", divergence)  # which `control` calls
    kv = ("--kv-dtype", "float32", "--kv-dtype2", "int8")
    found = _json(capsys, "divergence", folder, folder, *QUICK, "--control", *kv)
    assert seen == ["float32", "int8"]
    assert [x["exact"] for x in found["controls"]] == [True, True]


def test_a_control_that_fails_is_a_failure_of_ours(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = scoring._log_probabilities, iter(range(1000))
    shifted = lambda *x: real(*x) + 1e-6 * (next(calls) % 2)
    monkeypatch.setattr(scoring, "_log_probabilities", shifted)
    found = _json(capsys, "divergence", folder, folder, *QUICK, "--control", code=1)
    assert not found["controls"][0]["exact"]


def test_compare_of_two_dtypes(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half = str(tmp_path / "half")
    assert main(["convert", folder, half, "--dtype", "bfloat16"]) == 0
    capsys.readouterr()
    found = _json(capsys, "compare", folder, half, "--base", folder, *QUICK, "--no-packed")
    assert found["overall"]["kl_a"] == 0.0 < found["overall"]["kl_b"] < 1e-3
    assert found["overall"]["kl_verdict"] == "worse"
    assert found["bytes_a"] == found["bytes_b"]  # both are float32 in memory
    assert main(["eval", "compare", folder, half, "--base", folder, *QUICK]) == 0
    assert "KL(base || model) in nats" in capsys.readouterr().out


def test_tasks(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "items.jsonl"
    file.write_text('{"question": "a", "choices": ["b", "c"], "answer": 0}\n')
    found = _json(capsys, "tasks", folder, folder, "--task", str(file), "--normalize")
    assert found["models"][0] == found["models"][1]
    assert (found["p_value"], found["only_first"]) == (1.0, 0)
    arithmetic = ("--task", "arithmetic", "--items", "4", "--shots", "1")
    assert main(["eval", "tasks", folder, folder, *arithmetic]) == 0
    text = capsys.readouterr().out
    assert "addition" in text and "McNemar p = 1" in text
    file.write_text('{"prompt": 1}\n')
    assert main(["eval", "tasks", folder, "--task", str(file)]) == 2
    assert "items.jsonl:1: has the keys prompt" in capsys.readouterr().err


def test_numbers_that_json_does_not_know_are_left_out() -> None:
    assert eval_report._interval({"value": 1.0, "low": 0.5, "high": None}, 2) == "1.00 [0.50, inf]"
