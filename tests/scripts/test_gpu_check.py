"""scripts/gpu_check.py in its smoke form: every part runs, and every kernel's numbers are right."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp

from infer.jax_triton import packages
from scripts.gate import measure
from tests.cases.kernels import all_cases

ROOT = Path(__file__).parents[2]


def test_every_part_runs_and_is_written(tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, "scripts/gpu_check.py", "--smoke"],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=ROOT,
        env=os.environ | {"OUT": str(tmp_path), "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    (path,) = tmp_path.glob("*-smoke.json")
    parts = {name: part["result"] for name, part in json.loads(path.read_text())["parts"].items()}
    names = ["target", "peaks", "numerics", "timings", "decode", "loop", "peers", "tuning"]
    assert list(parts) == names
    kernels = [case.name for case in all_cases(smoke=True)]
    assert [row["case"] for row in parts["numerics"]["rows"]] == kernels
    assert all(row["ok"] for row in parts["numerics"]["rows"])
    for name in ("timings", "decode", "loop"):
        assert parts[name]["rows"]
        assert all(row["time_s"] > 0 for row in parts[name]["rows"]), parts[name]
    assert parts["peaks"]["copy_bytes_per_s"] > 0


def test_every_kernel_of_the_gate_has_a_smoke_case() -> None:
    triton = {case.kernel for case in all_cases() if case.form == "triton"}
    assert triton == {case.kernel for case in all_cases(smoke=True)}


def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/gpu_check.py"],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 2
    assert "--smoke" in done.stderr


def test_a_kernel_that_gives_nan_is_wrong() -> None:
    case = next(c for c in all_cases(smoke=True) if c.kernel == "rms_norm")
    x = jnp.ones((3,), jnp.float32)
    assert measure._difference(case, (x, x * jnp.nan), (x, x)) == float("inf")
    assert measure._difference(case, (x * jnp.nan, x), (x, x)) == float("inf")


def test_a_form_without_its_packages_is_left_out_with_the_reason(monkeypatch) -> None:
    run = measure.Run(smoke=False, only="sample", end=0.0)
    monkeypatch.setattr(packages, "missing", lambda: None)
    assert {case.form for case in run.cases()} == {"triton", "jax_triton"} and not run.skipped
    monkeypatch.setattr(packages, "missing", lambda: "triton is not installed")
    assert {case.form for case in run.cases()} == {"triton"}
    assert "skipped cases of form jax_triton: triton is not installed" in measure.table(run)
