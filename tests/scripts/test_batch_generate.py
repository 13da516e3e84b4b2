"""The batch script: one jit of the user's, and the tokens that `generate` gives."""

import json
import re
import subprocess
import sys
from pathlib import Path

import infer
from tests.models import tiny_folder

ROOT = Path(__file__).parents[2]


def test_its_texts_are_those_of_generate_and_it_traces_once(tmp_path: Path) -> None:
    folder, prompts = tiny_folder.write(tmp_path / "tiny"), ["hello", "a longer prompt", "x"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts) + "\n\n")
    options = ["--model", str(folder), "--max-tokens", "6", "--num-slots", "2"]
    run = subprocess.run(
        [sys.executable, "scripts/batch_generate.py", str(tmp_path / "prompts.txt"), *options],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    found = [json.loads(line) for line in run.stdout.splitlines()]
    greedy = infer.SamplingParams(temperature=0, max_tokens=6)
    expected = infer.load(folder).generate(prompts, greedy)
    assert [f["prompt"] for f in found] == prompts
    assert [f["text"] for f in found] == expected.text
    assert [f["num_tokens"] for f in found] == expected.lengths.tolist()
    assert re.search(
        r"^3 prompts, \d+ tokens in .* tokens/s .*; traced 1 time, compiled in", run.stderr
    )
