"""scripts/tune_blocks.py in its smoke form: what it measures is written, and read back."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from infer.pallas import tuned as tables
from infer.pallas.quantized_matmul import QuantizedMatmulBlocks
from infer.pallas.tuned import tuned
from scripts import tune_blocks
from scripts.gate import measure
from tests.cases.tuning import SMOKE

ROOT = Path(__file__).parents[2]


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "scripts/tune_blocks.py", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )


def test_what_it_measures_is_written_and_read_back(tmp_path, monkeypatch) -> None:
    done = _run("--smoke", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "3 of 3 shapes measured" in done.stdout
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    for case in SMOKE:
        assert case.tuning
        table = json.loads((tmp_path / "cpu" / f"{case.kernel}.json").read_text())
        assert (table["chip"], table["kernel"]) == ("cpu", case.kernel)
        entry = table["shapes"][case.tuning.key]
        assert entry["case"] == case.name and entry["jax"] == jax.__version__
        assert entry["date"] <= time.strftime("%Y-%m-%d")
        assert len(entry["tried"]) == len(case.tuning.sizes)
        fields = entry["fields"]
        times = [s for f, s in entry["tried"] if f == fields] or [entry["default_s"]]
        assert entry["time_s"] in times
        assert entry["time_s"] <= entry["default_s"]
        assert set(fields) <= set(case.tuning.fields or ())
        sizes = tuned(case.tuning.sizes[0], case.kernel, "cpu", case.tuning.key, tuple(fields))
        assert all(getattr(sizes, name) == value for name, value in fields.items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "JAX sees no GPU here; --smoke runs anywhere"),
        (("--smoke",), "name a folder by --out"),
        (("--smoke", "--out", "/nonexistent"), "/nonexistent is no folder"),
        (("--list", "--only", "nothing"), "no case has 'nothing' in its name"),
    ],
)
def test_what_it_cannot_do_is_said(arguments: tuple[str, ...], message: str) -> None:
    done = _run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr


def _tuned(monkeypatch, times: dict[str, float | Exception], end: float = math.inf) -> dict:
    """Return what is found for the first case where each candidate takes as long as is said."""
    asked = iter(times.values())

    def seconds(*_: object, **__: object) -> float:
        time_s = next(asked)
        if isinstance(time_s, Exception):
            raise time_s
        return time_s

    monkeypatch.setattr(measure, "seconds_per_call", seconds)
    return measure.tune(measure.Run(smoke=True, only="", end=end), SMOKE[0])


def test_only_what_is_faster_by_more_than_noise_is_chosen(monkeypatch) -> None:
    found = _tuned(monkeypatch, {"own": 1.0, "first": 0.99, "second": 1.5})
    assert (found["fields"], found["time_s"]) == ({}, 1.0)
    found = _tuned(monkeypatch, {"own": 1.0, "first": 0.9, "second": 0.5})
    assert (found["fields"], found["time_s"]) == (found["tried"][1][0], 0.5)


def test_what_does_not_run_or_computes_something_else_is_not_chosen(monkeypatch) -> None:
    found = _tuned(monkeypatch, {"own": 1.0, "first": 0.9, "second": RuntimeError("no memory")})
    assert found["time_s"] == 0.9 and found["tried"][1][1] == "RuntimeError: no memory"
    monkeypatch.setattr(measure, "_difference", lambda *_: 1.0)
    found = _tuned(monkeypatch, {"own": 1.0, "first": 0.9, "second": 0.5})
    assert found["fields"] == {} and found["tried"][-1][1] == "wrong numbers"
    assert "fields" not in _tuned(monkeypatch, {"own": RuntimeError("no"), "1": 1.0, "2": 1.0})


def test_a_case_that_time_cut_short_is_not_written(monkeypatch) -> None:
    found = _tuned(monkeypatch, {"own": 1.0, "first": 0.9, "second": 0.5}, end=0.0)
    assert found["stopped"] == "out of time" and "fields" not in found
    assert tune_blocks.line_of("case", found) == "case: out of time"


def test_a_chip_measures_only_what_it_can_run(monkeypatch) -> None:
    """Triton ends the process at products of E4M3 before Ada."""
    run = measure.Run(smoke=False, only="scaled_matmul", end=math.inf)
    names = {}
    for chip in ("a100-80gb", "l4-24gb"):
        monkeypatch.setitem(run.__dict__, "chip", chip)
        names[chip] = {case.name for case in measure.tuning_cases(run)}
    assert any(" fp8 " in name for name in names["l4-24gb"])
    assert names["a100-80gb"] == {name for name in names["l4-24gb"] if " int8 " in name} != set()


def test_writing_keeps_other_shapes_and_refuses_a_broken_file(tmp_path, monkeypatch) -> None:
    entry = lambda out: {"fields": {"block_out": out}, "time_s": 1.0}
    measure.write_tuned(tmp_path, "l4-24gb", "quantized_matmul", {"b": entry(32), "a": entry(16)})
    measure.write_tuned(tmp_path, "l4-24gb", "quantized_matmul", {"b": entry(128)})
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    read = lambda key: tuned(QuantizedMatmulBlocks(), "quantized_matmul", "l4-24gb", key).block_out
    assert (read("a"), read("b"), read("c")) == (16, 128, 64)
    path = tmp_path / "l4-24gb" / "quantized_matmul.json"
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    path.write_text("{")
    with pytest.raises(ValueError, match=r"quantized_matmul.json is broken"):
        measure.write_tuned(tmp_path, "l4-24gb", "quantized_matmul", {"a": entry(16)})


def test_every_call_of_a_timed_loop_is_made() -> None:
    """Two copies of the arguments, and one that goes around."""
    x = jnp.arange(4, dtype=jnp.float32)
    made = lambda carried, x: (x * 2, carried + x)
    program = measure.repeated(made, 3, donate=(0,))
    (one, two), ((first,), (second,)) = jax.jit(program)(((x, x), (x, x + 1)))
    assert jnp.array_equal(one[0], x + 3 * x) and jnp.array_equal(two[0], x + 3 * (x + 1))
    assert jnp.array_equal(first, 2 * x) and jnp.array_equal(second, 2 * (x + 1))
