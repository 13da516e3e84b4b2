"""`infer generate`: what reaches the API, what is printed where, and what is refused."""

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

import infer
from infer.cli.generate import summary
from infer.cli.main import main
from infer.errors import CapacityError
from tests.cli.conftest import FakeModel, FakeParams, Terminal

ARGS = ["generate", "--model", "m"]


def test_json_is_the_contract(model: FakeModel, capsys: pytest.CaptureFixture[str]):
    assert main([*ARGS, "a b", "c", "--json", "--max-tokens", "5"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count("\n") == 1
    found = json.loads(out)
    load_s = found["stats"].pop("load_s")
    assert 0 <= load_s < 5
    assert found == {
        "model": "m",
        "backend": "cpu",
        "implementation": "xla",
        "implementations": {"linear": "xla"},
        "outputs": [
            {
                "prompt": "a b",
                "text": " b a",
                "token_ids": list(b" b a"),
                "finish_reason": "length",
                "num_prompt_tokens": 3,
                "num_output_tokens": 4,
            },
            {
                "prompt": "c",
                "text": " c",
                "token_ids": list(b" c"),
                "finish_reason": "length",
                "num_prompt_tokens": 1,
                "num_output_tokens": 2,
            },
        ],
        "stats": {
            "compile_s": 1.5,
            "ttft_s": 0.25,
            "decode_tokens_per_s": 42.0,
            "prefill_tokens_per_s": None,
            "compiles": 1,
        },
    }


def test_logprobs_only_with_json(model: FakeModel, capsys: pytest.CaptureFixture[str]):
    assert main([*ARGS, "a", "--json", "--logprobs"]) == 0
    assert json.loads(capsys.readouterr().out)["outputs"][0]["logprobs"] == [-0.5, -0.5]
    assert main([*ARGS, "a", "--logprobs"]) == 2
    assert capsys.readouterr().err == "infer: --logprobs needs --json\n"


def test_chat_makes_each_prompt_a_users_message(
    model: FakeModel, capsys: pytest.CaptureFixture[str]
):
    assert main([*ARGS, "a b", "c", "--chat", "--json"]) == 0
    assert model.calls[0][0] == [list(b"user:a b"), list(b"user:c")]
    outputs = json.loads(capsys.readouterr().out)["outputs"]
    assert [output["prompt"] for output in outputs] == ["a b", "c"]


def test_text_and_figures_are_apart(model: FakeModel, capsys: pytest.CaptureFixture[str]):
    assert main([*ARGS, "a b"]) == 0
    out, err = capsys.readouterr()
    assert out == " b a\n"
    assert err.startswith("4 tokens, 42.0 tokens/s, first token after 0.250 s, loaded in ")
    assert err.endswith("compiled in 1.50 s, cpu, xla (INFER_NATIVE is 0)\n")


def test_several_prompts_are_told_apart(model: FakeModel, capsys: pytest.CaptureFixture[str]):
    assert main([*ARGS, "a b", "c"]) == 0
    assert capsys.readouterr().out == "[1] a b\n b a\n\n[2] c\n c\n"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], FakeParams(temperature=0.0, max_tokens=128)),
        (["--temperature", "0.5"], FakeParams(temperature=0.5, max_tokens=128)),
        # A sampling option that greedy decoding would ignore in silence turns sampling on.
        (["--top-p", "0.9"], FakeParams(top_p=0.9, max_tokens=128)),
        (["--seed", "7"], FakeParams(seed=7, max_tokens=128)),
        (
            ["--temperature", "0", "--top-k", "5", "--min-p", "0.1", "--max-tokens", "1"],
            FakeParams(temperature=0.0, top_k=5, min_p=0.1, max_tokens=1),
        ),
    ],
)
def test_sampling_options(model: FakeModel, options: list[str], expected: FakeParams):
    assert main([*ARGS, "a", *options]) == 0
    assert model.calls[0][1] == [expected]


def test_the_line_of_figures_counts_the_drafts():
    assert summary({"acceptance_rate": 2 / 3, "drafted": 6}) == "67% of 6 drafts accepted"


def test_run_options_and_dtype_reach_the_api(model: FakeModel):
    sizes = ["--num-slots", "4", "--page-size", "8", "--prefill-chunk", "32"]
    assert main([*ARGS, "a", *sizes, "--dtype", "float32", "--packed"]) == 0
    assert model.calls[0][2] == {"num_slots": 4, "page_size": 8, "prefill_chunk": 32}
    assert model.loads == [("m", {"dtype": "float32", "packed": True})]  # type: ignore[attr-defined]


def test_a_drafter_reaches_the_api_and_an_unknown_one_is_refused(
    model: FakeModel, capsys: pytest.CaptureFixture[str]
):
    assert main([*ARGS, "a", "--draft", "suffix:8"]) == 0
    assert model.calls[0][2] == {"draft": infer.spec.Suffix(k=8)}
    for name, error in {
        "medusa": "no drafter 'medusa'; there are ngram, suffix, lookahead and self:LAYERS,",
        "self": "draft is 'self'; it must be self:LAYERS or self:LAYERS:K",
        "self:0": "layers is 0; it must be an integer of at least 1",
        "suffix:x": "draft is 'suffix:x'; after a colon stands a number, as in suffix:8",
        "ngram:4:4": "draft is 'ngram:4:4'; it must be ngram or ngram:K",
        "org/small:99": "k is 99; it must be an integer from 1 to 64",
        "ngram:0": "k is 0; it must be an integer from 1 to 64",
    }.items():
        assert main([*ARGS, "a", "--draft", name]) == 2
        assert error in capsys.readouterr().err
    assert len(model.calls) == 1


def test_a_model_that_drafts_is_loaded_like_the_other(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    small, made = tmp_path / "small.gguf", []
    small.touch()
    of = lambda own, target, **options: made.append((own, target, options)) or "the drafter"
    monkeypatch.setattr(infer.spec.DraftModel, "of", of)
    assert main([*ARGS, "a", "--draft", f"{small}:3", "--dtype", "float32"]) == 0
    assert model.loads == [("m", ANY), (str(small), ANY)]  # type: ignore[attr-defined]
    assert all(options["dtype"] == "float32" for _, options in model.loads)  # type: ignore[attr-defined]
    assert made == [(model, model, {"k": 3})]
    assert model.calls[0][2] == {"draft": "the drafter"}
    assert main([*ARGS, "a", "--draft", "self:2:3"]) == 0
    assert model.calls[1][2] == {"draft": infer.spec.SelfDraft(layers=2, k=3)}


def test_the_rule_reaches_the_drafter_and_needs_one(
    model: FakeModel, capsys: pytest.CaptureFixture[str]
):
    assert main([*ARGS, "a", "--draft", "ngram:4", "--draft-rule", "coupled"]) == 0
    assert model.calls[0][2] == {"draft": infer.spec.NGram(k=4, rule="coupled")}
    assert main([*ARGS, "a", "--draft-rule", "coupled"]) == 2
    assert "--draft-rule says how drafts are judged; give a drafter" in capsys.readouterr().err


def test_stdin_is_one_prompt(model: FakeModel, stdin: Any):
    stdin("two\nlines é\n".encode())
    assert main(ARGS) == 0
    assert model.calls[0][0] == ["two\nlines é"]


def test_batch_file(model: FakeModel, tmp_path: Path):
    lines = ["plain text", "", '{"prompt": "json", "temperature": 0.5, "max_tokens": 3}', "last"]
    (tmp_path / "b.txt").write_text("\r\n".join(lines) + "\r\n")
    assert main([*ARGS, "--batch-file", str(tmp_path / "b.txt"), "--max-tokens", "9"]) == 0
    prompts, sampling, _ = model.calls[0]
    assert prompts == ["plain text", "json", "last"]
    greedy = FakeParams(temperature=0.0, max_tokens=9)
    assert sampling == [greedy, FakeParams(temperature=0.5, max_tokens=3), greedy]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'ok\n{"prompt": "x", "temperature": -1}\n', "line 2: temperature is -1, must be at"),
        (b'{"prompt": "x"\n', "line 1: not a JSON object"),
        (b'ok\n\n{"text": "x"}\n', 'line 3: needs "prompt" with a string'),
        (b'{"prompt": [1, 2]}\n', 'line 1: needs "prompt" with a string'),
        (b'{"prompt": ""}\n', "line 1: the prompt is empty"),
        (b'{"prompt": "x", "temprature": 1}\n', "line 1: unknown field 'temprature'; known: p"),
        (b'{"prompt": "\\ud800"}\n', "line 1: the prompt is not valid Unicode"),
        (b"\n \n", "has no prompt"),
        (b"a\xff\n", "is not UTF-8 text: bad byte at 1"),
        (b"{" * 100_000, "line 1: not a JSON object"),
    ],
)
def test_batch_errors_name_the_line(
    model: FakeModel,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: bytes,
    message: str,
):
    (tmp_path / "b").write_bytes(content)
    assert main([*ARGS, "--batch-file", str(tmp_path / "b")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
    assert model.loads == []  # type: ignore[attr-defined]  # refused before anything is loaded


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "x"], "infer: Missing option '--model'"),
        ([*ARGS, "x", "--temperature", "warm"], "Invalid value for '--temperature'"),
        ([*ARGS, "x", "--temperature", "-1"], "infer: temperature is -1.0, must be at least 0"),
        ([*ARGS, "x", "--frobnicate"], "infer: No such option: --frobnicate"),
        ([*ARGS, ""], "infer: prompt 1: the prompt is empty"),
        ([*ARGS, "x", "--batch-file", "f"], "infer: give prompts or --batch-file, not both"),
        ([*ARGS, "--batch-file", "/no/such"], "infer: /no/such: No such file or directory"),
    ],
)
def test_bad_usage_is_one_line_and_two(
    model: FakeModel, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_no_prompt_at_a_terminal(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "stdin", Terminal(sys.stdin))
    assert main(ARGS) == 2
    assert "no prompt: give one in quotes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (CapacityError("pool\nfull"), 2, "infer: pool full\n"),
        (ValueError("bad"), 2, "infer: bad\n"),
        (ConnectionError("no network"), 1, "infer: no network\n"),
        (RuntimeError("boom"), 1, "infer: RuntimeError: boom (INFER_DEBUG=1 shows where)\n"),
    ],
)
def test_exit_codes(
    model: FakeModel,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    code: int,
    message: str,
):
    model.raises = error
    assert main([*ARGS, "x"]) == code
    assert capsys.readouterr() == ("", message)


def test_debug_shows_the_traceback(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("INFER_DEBUG", "1")
    model.raises = RuntimeError("boom")
    assert main([*ARGS, "x"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_interrupt(model: FakeModel):
    model.raises = KeyboardInterrupt()
    assert main([*ARGS, "x"]) == 130


def test_a_terminal_gets_a_stream(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "stdout", Terminal(sys.stdout))
    assert main([*ARGS, "x", "--page-size", "4"]) == 0
    out, err = capsys.readouterr()
    assert out == "Hello\n"
    assert "tokens/s, first token after" in err
    assert model.calls == [("x", FakeParams(temperature=0.0, max_tokens=128), {"page_size": 4})]
