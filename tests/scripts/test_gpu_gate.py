"""The gate: its table is fresh, it compiles, and the whole loop is one CUDA graph.

What compiles needs the CUDA plugin's wheels and ptxas, which scripts/kernels_leg.sh installs.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from infer.jax_triton import packages
from scripts import gpu_gate
from scripts.gate import compile_for_gpu
from tests.cases.kernels import all_cases

ROOT = Path(__file__).parents[2]
LACK = compile_for_gpu.missing()
compiles = pytest.mark.skipif(LACK is not None, reason=str(LACK))


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=1200, cwd=ROOT
    )


def test_every_row_of_the_table_is_of_the_sources_as_they_are() -> None:
    wanted = [(case, chip) for case in all_cases() for chip in case.chips]
    stale = gpu_gate.stale(wanted, gpu_gate.read_table())
    assert not stale, f"run `make gate`: {sorted({case.name for case, _ in stale})}"


def test_no_kernel_in_the_table_spills_or_asks_for_more_than_its_chip_has() -> None:
    for row in gpu_gate.read_table():
        limit = compile_for_gpu.shared_memory_limit(row["chip"])
        assert row["kernels"], row
        for kernel in row["kernels"]:
            assert kernel["spill_bytes"] == 0, row
            assert kernel["shared_bytes"] <= limit, row


@pytest.mark.parametrize(
    ("kernel", "form", "changed"),
    [
        ("rms_norm", "triton", "infer/pallas/triton_call.py"),
        ("sample", "jax_triton", "infer/jax_triton/kernel_call.py"),
        ("sample", "jax_triton", "tests/cases/kernels/sample_jax_triton.py"),
    ],
)
def test_a_change_of_the_sources_is_seen(
    kernel: str, form: str, changed: str, tmp_path, monkeypatch
) -> None:
    case = next(c for c in all_cases() if (c.kernel, c.form) == (kernel, form))
    before = gpu_gate.source_hash(case)
    for folder in ("infer/pallas", "infer/jax_triton", "tests/cases/kernels"):
        (tmp_path / folder).mkdir(parents=True)
        for path in (ROOT / folder).glob("*.py"):
            (tmp_path / folder / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(gpu_gate, "ROOT", tmp_path)
    assert gpu_gate.source_hash(case) == before
    shared = tmp_path / changed
    shared.write_text(shared.read_text() + "\n# changed\n")
    assert gpu_gate.source_hash(case) != before


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--only", "nothing"], 2, "no case has such a name or chip"),
        (["--chip", "nochip", "--check"], 2, "no case has such a name or chip"),
        (["--jobs", "0"], 2, "invalid choice: 0"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(arguments, code: int, message: str) -> None:
    done = _python("scripts/gpu_gate.py", *arguments)
    assert done.returncode == code
    assert message in done.stderr


def test_a_broken_table_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(gpu_gate, "ROOT", tmp_path)
    for text in ("{", "{}", '{"rows": [{"kernel": 1}]}'):
        monkeypatch.setattr(gpu_gate, "TABLE", tmp_path / "gate.json")
        gpu_gate.TABLE.write_text(text)
        with pytest.raises(SystemExit, match=r"gate\.json is broken"):
            gpu_gate.read_table()


@pytest.mark.kernels
@compiles
@pytest.mark.parametrize(
    "name",
    [
        "rms_norm triton 32x4096 bfloat16 residual",
        pytest.param(
            "sample jax_triton llama-3 b32 v128256",
            marks=pytest.mark.skipif(
                packages.missing() is not None, reason=str(packages.missing())
            ),
        ),
    ],
)
def test_a_row_compiles_to_what_the_table_says(name: str) -> None:
    done = _python("scripts/gpu_gate.py", "--worker", name, "h200-141gb")
    assert done.returncode == 0, done.stderr[-2000:]
    row = json.loads(done.stdout.splitlines()[-1])
    table = {gpu_gate.key_of(r): r for r in gpu_gate.read_table()}
    assert row["kernels"] == table[name, "h200-141gb"]["kernels"]


def test_rows_of_a_form_without_its_packages_are_skipped_in_words(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_gate.py", "--only", "sample jax_triton gemma"])
    monkeypatch.setattr(compile_for_gpu, "missing", lambda: None)
    monkeypatch.setattr(packages, "missing", lambda: "triton is not installed (pip install triton)")
    assert gpu_gate.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "gate: 5 rows of form jax_triton skipped: triton is not installed (pip install triton)",
        "gate: 5 rows, 0 compiled, 0 failed",
    ]


@pytest.mark.kernels
@compiles
@pytest.mark.parametrize("program", ["decode_step", "packed_decode_step", "generate_loop"])
def test_a_program_is_one_command_buffer_that_works_in_place(program: str) -> None:
    done = _python("-m", "scripts.gate.compile_program", program)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["command_buffers"] == 1
    assert found["other_thunks"] == []
    assert found["alias_bytes"] >= found["pool_bytes"]
    assert found["pool_copies"] == 0
    assert found["temp_bytes"] < found["pool_bytes"]
    assert found["missing_kernels"] == []
    if program == "packed_decode_step":
        # Of two layers: q, k, v, o, gate with up, down; norms, gate and residuals are in them.
        assert found["launches"]["quantized_matmul"] == 2 * 6


@pytest.mark.kernels
@pytest.mark.skipif(LACK is None, reason="the wheels are here")
def test_where_nothing_can_be_compiled_the_gate_says_so() -> None:
    if os.environ.get("REQUIRE_GATE") == "1" and sys.version_info[:2] == (3, 12):
        pytest.fail(f"REQUIRE_GATE=1, and {LACK}")
    done = _python("scripts/gpu_gate.py", "--all")
    assert done.returncode == 2
    assert "cannot compile here" in done.stderr


def test_a_machine_without_any_plugin_is_told_so(monkeypatch) -> None:
    def find_spec(name: str) -> None:
        if "." in name:  # as importlib does where the parent is not there
            raise ModuleNotFoundError(name)

    monkeypatch.setattr(compile_for_gpu.importlib.util, "find_spec", find_spec)
    assert "jax-cuda13-plugin" in (compile_for_gpu.missing() or "")
