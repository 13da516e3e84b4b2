"""The benchmark's own side runs, counts right, and writes what it promises."""

import json

import pytest

from benchmarks import decode, uncached
from infer.bench import ours
from infer.bench.cases import DecodeCase, prompt_rows
from infer.models.params import random_params
from tests.models import tiny
from tests.real_models import real_model_path

IDS = list(range(1, 40))
TINY = DecodeCase(batch=2, prompt_tokens=8, new_tokens=4)


def test_measure_reports_rates_of_the_same_step():
    line = decode.measure(tiny.llama(), TINY, IDS, [], rounds=2)
    # Two rows: a step makes two tokens.
    assert line["decode_tokens_per_s"] > 0
    assert line["time_s"] > 0
    assert line["prefill_tokens_per_s"] > 0
    assert line["ttft_s"] > 0
    assert line["shape"] == {"batch": 2, "prompt_tokens": 8, "new_tokens": 4}
    assert 0 < line["roofline_fraction"] < 1
    assert line["first_call_ttft_s"] > 0


def test_bytes_and_flops_by_hand():
    params = tiny.llama()
    case = DecodeCase(batch=2, prompt_tokens=8, new_tokens=5)
    # A layer: q 32x32, k and v 16x32, o 32x32, gate, up and down 48x32; the tied head is 96x32.
    matrices = 2 * (32 * 32 * 2 + 16 * 32 * 2 + 48 * 32 * 3) + 96 * 32
    norms = 2 * 2 * 32 + 32
    context = 10  # 8 cached before the first step, 11 before the last but one: (8 + 12) / 2
    kv = 2 * 2 * (8 + 8) * 4 * context
    found = ours.roofline_of(params, case)
    assert found["bytes"] == 4 * (matrices + norms) + 2 * kv
    assert found["flops"] == 2 * (2 * matrices + 4 * 2 * 32 * context)


def test_an_untied_embedding_is_not_read_by_a_step():
    config = tiny.llama_config(tied_embeddings=False)
    untied, tied = random_params(config, seed=0), tiny.llama()
    assert ours.model_shape(untied) == ours.model_shape(tied)


def test_cached_and_uncached_decoding_give_equal_tokens():
    row = uncached.compare(tiny.llama(), IDS, context=16, new_tokens=4, rounds=1)
    assert row["tokens_equal"]
    assert row["ratio"] == row["cached_tokens_per_s"] / row["uncached_tokens_per_s"]


def test_prompts_of_a_batch_differ_and_repeat_the_text():
    case = DecodeCase(batch=3, prompt_tokens=50, new_tokens=1)
    rows = prompt_rows(IDS, case)
    assert [len(row) for row in rows] == [50, 50, 50]
    assert len({tuple(row) for row in rows}) == 3
    assert rows[0][39:] == rows[0][:11]


def test_common_prefix_is_that_of_the_worst_row():
    assert decode.equal_leading_tokens([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 5, 7]]) == 2
    assert decode.equal_leading_tokens([[1, 2]], [[1, 2]]) == 2


def test_an_unknown_peer_is_bad_usage(capsys):
    with pytest.raises(SystemExit) as raised:
        decode.main(["--against", "vllm"])
    assert raised.value.code == 2
    assert "no peer is called 'vllm'" in capsys.readouterr().err


def test_missing_peers_say_how_to_install_them(tmp_path):
    with pytest.raises(decode.peers.NoPeersError, match=r"run: bash scripts/peers\.sh"):
        decode.peers.python_of(tmp_path)


@pytest.mark.real
def test_command_line_on_the_real_model(tmp_path, capsys):
    path = real_model_path("smollm2-135m")
    saved = tmp_path / "results.json"
    arguments = "--batch 1 --prompt-tokens 16 --new-tokens 4 --rounds 1 --no-cold-start --json"
    assert decode.main([*arguments.split(), "--model", str(path), "--save", str(saved)]) == 0
    (printed,) = json.loads(capsys.readouterr().out)
    (kept,) = map(json.loads, saved.read_text().splitlines())
    assert kept["decode_tokens_per_s"] == pytest.approx(printed["decode_tokens_per_s"], rel=1e-3)
    assert {"date", "chip", "dtype", "shape", "time_s", "bytes", "flops"} <= kept.keys()
