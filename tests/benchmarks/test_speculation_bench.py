"""The table of docs/speculation.md from saved results."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import speculation


def line(**fields: Any) -> dict[str, Any]:
    ours = {"acceptance_rate": 0.5, "tokens_per_pass": 1.5}
    theirs = {"acceptance_rate": None, "tokens_per_pass": 1.0}
    return {
        "model": "smollm2-135m", "workload": "code", "batch": 4, "new_tokens": 11, "rounds": 3,
        "threads": 2, "chip": "a CPU", "date": "2026-01-02",
        "decode_s": {"plain": 0.5, "ngram:4": 0.25, "llama.cpp": 1.0, "llama.cpp ngram:4": 1.0},
        "speedup": {"ngram:4": 2.0, "llama.cpp ngram:4": 1.0},
        "speedup_range": {"ngram:4": [1.5, 2.5], "llama.cpp ngram:4": [0.9, 1.1]},
        "speedup_whole": {"ngram:4": 1.75, "llama.cpp ngram:4": 1.0},
        "stats": {"ngram:4": ours, "llama.cpp ngram:4": theirs},
    } | fields  # fmt: skip


def test_the_table_has_a_row_a_drafter():
    rows = speculation.table([line()]).split("\n")
    assert rows[2:] == [
        "| smollm2-135m | code | 4 | ngram:4 | 50% | 1.50 | 80 | **2.00** (1.50 to 2.50) | 1.75 |",
        "| smollm2-135m | code | 4 | llama.cpp ngram:4 | - | 1.00 | 40 | **1.00** (0.90 to 1.10) "
        "| 1.00 |",
    ]


def test_the_document_has_the_newest_result_of_each_cell(tmp_path: Path):
    document = tmp_path / "speculation.md"
    document.write_text("before\n<!-- speculation -->\nold\n<!-- /speculation -->\nafter\n")
    newer = line(speedup={"ngram:4": 3.0}, speedup_range={"ngram:4": [3.0, 3.0]})
    other = line(batch=1, speedup={"ngram:4": 4.0}, speedup_range={"ngram:4": [4.0, 4.0]})
    (tmp_path / "speculation-cpu-2026-01-02.json").write_text(
        "".join(json.dumps(each) + "\n" for each in (line(), newer, other))
    )
    speculation.write_docs(document, tmp_path)
    text = document.read_text()
    assert text.startswith("before\n<!-- speculation -->\n2026-01-02, a CPU, 2 threads, 3 rounds")
    assert text.endswith("<!-- /speculation -->\nafter\n") and "old" not in text
    assert text.index("**4.00**") < text.index("**3.00**") and "**2.00**" not in text


def test_no_results_and_no_place_are_errors(tmp_path: Path):
    document = tmp_path / "speculation.md"
    document.write_text("nothing\n")
    with pytest.raises(SystemExit, match="run with --save first"):
        speculation.write_docs(document, tmp_path)
    (tmp_path / "speculation-cpu-1.json").write_text(json.dumps(line()) + "\n")
    with pytest.raises(ValueError, match="no place for the table"):
        speculation.write_docs(document, tmp_path)
    assert document.read_text() == "nothing\n"


def test_a_peers_counts_are_named_as_ours():
    answer = {"tokens": [[1] * 5] * 2, "drafted": 4, "accepted": 3, "row_passes": 5}
    found = speculation.peer_stats(answer, batch=2)
    assert found == {"drafted": 4, "acceptance_rate": 0.75, "tokens_per_pass": 8 / 5}
    assert speculation.peer_stats(answer | {"drafted": 0}, 2)["acceptance_rate"] is None
