"""`infer bench`: what it refuses, what it runs, and one real run."""

import json
from pathlib import Path
from typing import Any

import pytest

from infer.bench.cases import DecodeCase
from infer.cli.bench import What, cases_of
from infer.cli.main import main
from tests.real_models import real_model_path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["decode", "--against", "vllm"], "no peer is called 'vllm'; there are llama.cpp, trans"),
        (["decode", "--batch", "1,0"], "--batch is '1,0'; give different positive numbers"),
        (["decode", "--batch", "8,8"], "--batch is '8,8'; give different positive numbers"),
        (["decode", "--batch", "1,01"], "--batch is '1,01'; give different positive numbers"),
        (["decode", "--batch", ""], "--batch is ''; give different positive numbers"),
        (["prefill", "--batch", ""], "--batch is ''; give different positive numbers"),
        (["decode", "--batch", "9" * 5000], "give different positive numbers, such as 1,8,32"),
        (["decode", "--batch", "65537"], "num_slots is 65537, must be an integer from 1 to 65536"),
        (["decode", "--kv-dtype", "int16"], "'--kv-dtype': 'int16' is not one of 'float32', 'bf"),
        (["decode", "--peer-timeout", "0.5"], "--peer-timeout is 0.5; give seconds from 1 to"),
        (["decode", "--peer-timeout", "nan"], "--peer-timeout is nan; give seconds from 1 to"),
        (["decode", "--rounds", "0"], "Invalid value for '--rounds'"),
        (["prefill", "--new-tokens", "4"], "--new-tokens goes with decode"),
        (["train"], ": 'train' is not one of 'decode', 'prefill', 'spec'"),
        (["spec"], "--draft goes with spec, and spec needs it"),
        (["decode", "--draft", "ngram"], "--draft goes with spec"),
        (["spec", "--draft", "medusa"], "no drafter 'medusa'; there are ngram, suffix, lookahead"),
        (["spec", "--draft", "ngram:0"], "k is 0; it must be an integer from 1 to 64"),
        (["spec", "--draft", "ngram", "--against", "llama.cpp"], "--against, --prompt-tokens and"),
        (["spec", "--draft", "ngram", "--batch", "0"], "--batch is '0'; give different positive"),
        (["decode", "--threads", "100000"], "threads is 100000; this process may use 1 to"),
    ],
)
def test_bad_options(
    options: list[str], message: str, model: Any, capsys: pytest.CaptureFixture[str]
):
    assert main(["bench", *options]) == 2
    assert model.loads == []
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err
    assert "Value error" not in err


def test_missing_peers_say_how_to_get_them(
    tmp_path: Path, model: Any, capsys: pytest.CaptureFixture[str]
):
    command = ["bench", "decode", "--against", "llama.cpp", "--peers", str(tmp_path)]
    assert main(command) == 2
    assert f"run: bash scripts/peers.sh {tmp_path}" in capsys.readouterr().err
    assert model.loads == []  # said before anything is loaded


def test_decode_starts_with_the_prefill_of_512_tokens():
    prefill = DecodeCase(batch=1, prompt_tokens=512, new_tokens=1)
    assert cases_of(What.decode, "1,4", None, 16) == [
        prefill,
        DecodeCase(batch=1, prompt_tokens=32, new_tokens=16),
        DecodeCase(batch=4, prompt_tokens=32, new_tokens=16),
    ]
    assert cases_of(What.prefill, None, None, None) == [prefill]
    assert [c.batch for c in cases_of(What.decode, None, None, None)] == [1, 1, 8, 32]


@pytest.mark.real
def test_a_real_run_prints_one_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from infer.bench import machine

    monkeypatch.setattr(machine, "_READ_BYTES", 1 << 20)
    monkeypatch.setenv("INFER_NO_COMPILE_CACHE", "1")
    path = str(real_model_path("smollm2-135m"))
    command = ["bench", "prefill", "--model", path, "--prompt-tokens", "16", "--rounds", "1"]
    assert main([*command, "--kv-dtype", "float16", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["ours"]["cache"] == "float16"
    assert err.splitlines()[0] == f"infer: ours: loads {path}"
    assert "infer: round 1 of 1, prefill, ours: " in err
    assert found["cases"]["prefill"]["shape"] == {
        "batch": 1,
        "prompt_tokens": 16,
        "new_tokens": 1,
    }
    assert found["cases"]["prefill"]["tokens_per_s"]["ours"]["median"] > 0
    assert found["against"] is None
    assert "ratio_prefill" not in found
