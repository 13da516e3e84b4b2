"""Divergences by hand, the page cache's logits, intervals, and tables that find their places."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import cpu_accuracy, cpu_tables
from infer.models import decoder
from infer.weights.gguf import GGUFFile
from tests.models import tiny


def test_divergence_by_hand():
    # P = (1/2, 1/2), Q = (1/4, 3/4): 1/2 ln 2 + 1/2 ln 2/3 = 1/2 ln 4/3.
    want = np.log(np.array([[0.5, 0.5]] * 5, np.float32)) + 3
    got = np.log(np.array([[0.25, 0.75]] * 5, np.float32)) - 1
    np.testing.assert_allclose(cpu_accuracy.divergence(want, got), 0.5 * np.log(4 / 3), rtol=1e-6)
    padded = np.pad(want, ((0, 0), (0, 1)), constant_values=-np.inf)
    also = np.pad(got, ((0, 0), (0, 1)), constant_values=-np.inf)
    np.testing.assert_allclose(cpu_accuracy.divergence(padded, also), 0.5 * np.log(4 / 3), 1e-6)


def test_logits_through_the_page_cache_are_those_without_it():
    params = tiny.llama()
    tokens = jnp.asarray([5, 3, 9, 1, 7, 2, 8, 4, 6, 11, 10, 13, 12, 15, 14, 17, 16, 19], jnp.int32)
    found = cpu_accuracy.paged_logits(params, tokens, implementation="xla")
    np.testing.assert_allclose(found, decoder.forward(params, tokens[None])[0], atol=1e-5)


def test_interval_holds_the_mean_and_is_paired():
    found = cpu_accuracy.interval(np.full(6, 0.25))
    assert found == {"mean": 0.25, "low": 0.25, "high": 0.25}
    found = cpu_accuracy.interval(np.array([1.0, -1.0] * 10))
    assert found["low"] < 0 < found["high"]


def test_a_dequantised_file_holds_the_same_numbers(tmp_path):
    from infer.weights.gguf_writer import GGUFTensor, write_gguf

    blocks = np.random.default_rng(0).integers(0, 255, (4, 18), np.uint8)
    blocks[:, :2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    tensor = GGUFTensor(name="w", shape=(4, 32), type_name="Q4_0", data=blocks)
    vector = GGUFTensor.of("v", np.arange(32, dtype=np.float32))
    write_gguf(tmp_path / "a.gguf", {"general.architecture": "llama"}, [tensor, vector])
    cpu_accuracy.write_dequantised(tmp_path / "a.gguf", tmp_path / "b.gguf")
    with GGUFFile.open(tmp_path / "a.gguf") as a, GGUFFile.open(tmp_path / "b.gguf") as b:
        assert {t.type_name for t in b.tensors.values()} == {"F32"}
        for name in ("w", "v"):
            np.testing.assert_array_equal(a.array(name), b.array(name))
    assert cpu_accuracy.types_of(tmp_path / "a.gguf") == {"Q4_0": {"tensors": 1, "bytes": 72}}


def spread(value: float) -> dict[str, float]:
    return {"median": value, "min": value - 1, "max": value + 1}


def speed_line(section: str, rate: float) -> dict:
    case = {"tokens_per_s": {"ours": spread(rate), "llama.cpp": spread(rate / 2)}}
    case |= {"ratios": {"llama.cpp": spread(2.0)}, "bytes_a_step": 97e6}
    return {
        "section": section,
        "model": "smollm2-135m",
        "date": "2026-01-01",
        "cpu": "a CPU",
        "threads": 2,
        "rounds": 3,
        "ours": {"weights": "packed", "native": "avx2", "jax": "0"},
        "peers": {
            "llama.cpp": {
                "version": "1",
                "openmp": "libomp",
                "system_info": "AVX2",
                "cache": "f16",
                "flash_attention": "auto",
            }
        },
        "cases": {"decode_b1": case},
    }


ACCURACY = {
    "file": "smollm2-135m",
    "types": {"Q4_1": {"tensors": 2, "bytes": 30}, "Q8_0": {"tensors": 1, "bytes": 10}},
    "ours": {"kl_mean": 1e-3, "kl_p99": 1e-2, "top1": 0.9},
    "theirs": {"kl_mean": 2e-3, "kl_p99": 2e-2, "top1": 0.8},
    "kl_difference": {"mean": -1e-3, "low": -2e-3, "high": -1e-4},
}


def test_tables_go_where_the_document_says(tmp_path):
    old, new = speed_line("decode-b1", 100.0), speed_line("decode-b1", 120.0)
    results = tmp_path / "cpu-2026-01-01.json"
    results.write_text("\n".join(map(json.dumps, [old, new])))
    (tmp_path / "cpu-accuracy-2026-01-01.json").write_text(json.dumps(ACCURACY))
    document = tmp_path / "cpu.md"
    old_text = {"speed": "old\n", "accuracy": "", "types": "old\nold\n"}
    marks = "".join(f"<!-- {n} -->\n{t}<!-- /{n} -->\n" for n, t in old_text.items())
    document.write_text(f"# Title\n{marks}end\n")
    cpu_tables.write(document, tmp_path)
    text = document.read_text()
    assert text.startswith("# Title\n<!-- speed -->\n2026-01-01, a CPU, 2 threads, 3 rounds")
    assert "| smollm2-135m | decode, batch 1 | 120 (119..121) | 60 (59..61) |" in text
    assert "100 (" not in text  # the later line of the same section counts
    assert "| smollm2-135m | Q4_1 75%, Q8_0 25% | 1.00e-03 | 2.00e-03 |" in text
    assert "| better | 1.00e-02 | 2.00e-02 | 90.00% | 80.00% |" in text
    assert text.endswith("<!-- /types -->\nend\n")
    assert "old" not in text
    document.write_text("no places")
    with pytest.raises(ValueError, match="no place for the table 'speed'"):
        cpu_tables.write(document, tmp_path)
