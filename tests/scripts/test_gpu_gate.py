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
from infer.ops import choice
from scripts import gpu_gate
from scripts.gate import compile_for_gpu, fused
from tests.cases.kernels import all_cases

ROOT = Path(__file__).parents[2]
LACK = compile_for_gpu.missing()
compiles = pytest.mark.skipif(LACK is not None, reason=str(LACK))


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    # The table is of what XLA compiles as it comes, and of this very compilation.
    env = {**os.environ, "XLA_FLAGS": "", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    return subprocess.run(
        [sys.executable, *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=1200,
        cwd=ROOT,
    )


def test_every_row_of_the_table_is_of_the_sources_as_they_are() -> None:
    wanted = [(case, chip) for case in all_cases() for chip in case.chips]
    stale = gpu_gate.stale(wanted, gpu_gate.read_table())
    assert not stale, f"run `make gate`: {sorted({case.name for case, _ in stale})}"
    programs = gpu_gate.stale_programs(list(gpu_gate.PROGRAMS), gpu_gate.read_programs())
    assert not programs, f"run `make gate`: {programs}"


def test_the_table_has_each_program_in_one_graph_and_in_place() -> None:
    for row in gpu_gate.read_programs():
        assert row["command_buffers"] == 1 and row["pool_copies"] == 0, row
        assert row["alias_bytes"] >= row["pool_bytes"] > row["temp_bytes"], row
        assert set(row["kernels"]) == set(gpu_gate.PROGRAMS[row["program"]])
    by_name = {row["program"]: row["kernels"] for row in gpu_gate.read_programs()}
    # 32 layers of 7 matrices, each a launch; in int4 gate and up are one.
    assert by_name["decode_step_int4"]["quantized_matmul"] == 32 * 6
    assert by_name["decode_step_fp8"]["scaled_matmul"] == 32 * 7


def test_a_program_that_breaks_a_rule_is_refused_in_words() -> None:
    good = {
        "command_buffers": 1,
        "alias_bytes": 8,
        "pool_bytes": 8,
        "pool_copies": 0,
        "temp_bytes": 1,
        "kernels": {"sample": 1},
    }
    script = "import json,sys;from scripts.gate.compile_program import problems_of as p;"
    script += "print(json.dumps([p(*a) for a in json.load(sys.stdin)]))"
    bad = {
        "command_buffers": (2, "2 command buffers, not one"),
        "alias_bytes": (7, "aliases 7 bytes, fewer than the pools' 8"),
        "pool_copies": (1, "copies a pool 1 times"),
        "temp_bytes": (8, "takes 8 bytes for a while, as much as the pools"),
        "kernels": ({"sample": 0}, "lacks a kernel: {'sample': 0}"),
    }
    asked = [[good, []], [good, ["2: kGemm"]]]
    asked += [[good | {key: value}, []] for key, (value, _) in bad.items()]
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    words = [[message] for _, message in bad.values()]
    assert found == [[], ["beside the command buffer: 2: kGemm"], *words]


def test_a_change_of_a_program_is_seen(tmp_path, monkeypatch) -> None:
    before = {name: gpu_gate.program_hash(name) for name in gpu_gate.PROGRAMS}
    for folder in ("infer/pallas", "tests/cases"):
        (tmp_path / folder).mkdir(parents=True)
        for path in (ROOT / folder).glob("*.py"):
            (tmp_path / folder / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(gpu_gate, "ROOT", tmp_path)
    changed = lambda: {n for n in gpu_gate.PROGRAMS if gpu_gate.program_hash(n) != before[n]}
    assert changed() == set()
    kernel = tmp_path / "infer" / "pallas" / "scaled_matmul.py"
    kernel.write_text(kernel.read_text() + "\n# changed\n")
    assert changed() == {"decode_step_fp8"}
    cases = tmp_path / "tests" / "cases" / "programs.py"
    cases.write_text(cases.read_text() + "\n# changed\n")
    assert changed() == set(gpu_gate.PROGRAMS)


def test_the_page_says_what_the_ops_choose() -> None:
    page = (ROOT / "docs" / "kernels.md").read_text()
    chips = ("a100-80gb", "h200-141gb")
    cells = lambda choose: [fused.cell(choose, chip) for chip in chips]
    fp8 = "FP8, a scale a channel, activations a token"
    assert cells(lambda rows, chip: fused.linear_choice(fp8, rows, chip))[0] == "-"
    lines = [line.split(" | ") for line in page.splitlines() if line.startswith("| planar: ")]
    for name in ("int4, groups of 128", "int3, groups of 128", fp8):
        (line,) = [one for one in lines if name in one[0].removeprefix("| planar: ").split("; ")]
        choose = lambda rows, chip, name=name: fused.linear_choice(name, rows, chip)
        assert [line[1], line[3]] == cells(choose), name
    (line,) = [one.split(" | ") for one in page.splitlines() if one.startswith("| experts: bf")]
    choose = lambda rows, chip: fused.expert_choice("Q4_K", rows, chip)
    assert "Q4_K" in line[0] and [line[1], line[3]] == cells(choose)


def test_a_cell_names_forms_and_their_rows(monkeypatch) -> None:
    monkeypatch.setattr(fused, "ROWS", (1, 64, 65, 512))
    pick = lambda *forms: (
        lambda rows, chip: choice.Choice("linear", dict(zip(fused.ROWS, forms, strict=True))[rows])
    )
    assert fused.cell(pick("xla", "xla", "xla", "xla"), "any") == "-"
    assert fused.cell(pick("triton", "triton", "triton", "triton"), "any") == "triton"
    assert fused.cell(pick("triton", "triton", "xla", "xla"), "any") == "triton 1-64"
    assert fused.cell(pick("triton", "triton", "mosaic", "mosaic"), "any") == (
        "triton 1-64, mosaic 65+"
    )


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
@pytest.mark.parametrize("program", list(gpu_gate.PROGRAMS))
def test_a_program_is_one_command_buffer_that_works_in_place(program: str) -> None:
    done = _python("-m", "scripts.gate.compile_program", program)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert "problems" not in found, found
    (row,) = [row for row in gpu_gate.read_programs() if row["program"] == program]
    same = ("command_buffers", "alias_bytes", "pool_bytes", "temp_bytes", "launches", "kernels")
    if program == "decode_step_int4":
        # Of 32 layers: q, k, v, o, gate with up, down; norms, gate and residuals are in them.
        assert found["kernels"]["quantized_matmul"] == 32 * 6
    if found["jax"] == row["jax"]:
        assert {key: found[key] for key in same} == {key: row[key] for key in same}


@pytest.mark.kernels
@compiles
def test_a_timed_loop_holds_what_it_times() -> None:
    """XLA leaves out of a loop what nobody takes from it: then an empty one would be timed."""
    script = """
from scripts.gate import compile_for_gpu
compile_for_gpu.prepare_environment()
import jax, re
from scripts.gate import measure
from tests.cases.kernels import all_cases
case = next(c for c in all_cases() if c.name.startswith("quantized_matmul triton Q4_0 16x"))
args = jax.eval_shape(lambda key: (case.make(key),) * 3, jax.random.key(0))
program = compile_for_gpu.compile_for(measure.repeated(case.run, 5), (args,), "h200-141gb")
thunks = "\\n".join(program.thunks)
assert "body:" in thunks, thunks
body = thunks[thunks.index("body:"):]
print(len(re.findall(r"\\] quantized_matmul ", body)))
"""
    done = _python("-c", script)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "3"


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
