"""Batch files: every line answered once, whatever is in the others and whoever kills the run."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import infer
from infer.cli.main import main
from infer.compiling import num_traces
from infer.errors import ConfigError
from infer.serve import batch
from infer.serve.batch_file import AnswerFile, answer_line, is_openai_batch, read_lines
from tests.models import tiny_folder

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder.write(tmp_path_factory.mktemp("m") / "tiny")


@pytest.fixture(scope="module")
def llm(folder: Path) -> infer.LLM:
    return infer.LLM(folder, num_slots=2)


def _chat(custom_id: str, text: str = "hi", **body: Any) -> dict[str, Any]:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 8} | body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def _completion(custom_id: str, prompt: Any = "hello", **body: Any) -> dict[str, Any]:
    body = {"model": "m", "prompt": prompt, "max_tokens": 8} | body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def _data(*lines: Any) -> bytes:
    return b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines)


def _answers(
    llm: infer.LLM, data: bytes, done: set[str] | None = None, **defaults: Any
) -> list[dict[str, Any]]:
    lines, found = read_lines(data, "m"), []
    counts = batch.answer_batch(
        llm, lines, model="m", defaults=defaults, done=done or set(), write=found.extend
    )
    assert sum(counts.values()) == len(lines)
    assert counts["refused"] == sum(a["error"] is not None for a in found)
    for answer in found:
        answer_line(answer)
    return found


def test_answers_are_what_the_llm_says(llm: infer.LLM) -> None:
    seeded = dict(temperature=0.9, seed=4, n=2, logprobs=True, top_logprobs=2)
    data = _data(
        _chat("a", temperature=0),
        _completion("b", ["hello", "x"], temperature=0, stop_token_ids=[100]),
        _chat("c", **seeded),
    )
    found = {a["custom_id"]: a for a in _answers(llm, data)}
    greedy = infer.SamplingParams(temperature=0, max_tokens=8)
    (chat,) = llm.chat([{"role": "user", "content": "hi"}], greedy)
    body = found["a"]["response"]["body"]
    assert body["choices"][0]["message"]["content"] == chat.outputs[0].text
    assert body["choices"][0]["finish_reason"] == chat.outputs[0].finish_reason
    num_new = len(chat.outputs[0].token_ids)
    assert body["usage"] == {
        "prompt_tokens": len(chat.prompt_token_ids),
        "completion_tokens": num_new,
        "total_tokens": len(chat.prompt_token_ids) + num_new,
    }
    texts = [o.outputs[0].text for o in llm.generate(["hello", "x"], greedy)]
    assert [c["text"] for c in found["b"]["response"]["body"]["choices"]] == texts
    sampled = infer.SamplingParams(temperature=0.9, seed=4, n=2, max_tokens=8)
    (both,) = llm.chat([{"role": "user", "content": "hi"}], sampled)
    choices = found["c"]["response"]["body"]["choices"]
    assert [c["message"]["content"] for c in choices] == [o.text for o in both.outputs]
    assert len(choices[0]["logprobs"]["content"]) == len(both.outputs[0].token_ids)
    assert {len(t["top_logprobs"]) for t in choices[0]["logprobs"]["content"]} == {2}


# Where only a value's type is wrong, the checker of the tests is faster than SamplingParams.
BROKEN: list[tuple[Any, str | None, str]] = [
    (b'{"custom_id": "x", ', None, "not a line of JSON"),
    (b"[" * 100_000, None, "nested too deeply"),
    (b"\xff\xfe{}", None, "not a line of JSON"),
    ([1], None, "not a JSON object"),
    ({"method": "POST"}, None, "custom_id is missing"),
    ({"custom_id": 3}, None, "custom_id is missing"),
    (_chat("x") | {"method": "GET"}, "x", "method is 'GET'"),
    (_chat("x") | {"url": "/v1/embeddings"}, "x", "url is '/v1/embeddings'"),
    (_chat("x") | {"url": ["/v1"]}, "x", "url is ['/v1']"),
    (_chat("x") | {"body": []}, "x", "body is a list"),
    (_chat("x") | {"more": 1}, "x", "unknown field 'more'"),
    (_chat("x", tools=[{"type": "function"}]), "x", "tools is not supported yet"),
    (_chat("x", temperature=-1), "x", "temperature is -1"),
    (_chat("x", temperature="hot"), "x", "'hot'"),
    (_chat("x", stop=5), "x", "5"),
    (_chat("x", stop=[5]), "x", "stop"),
    (_chat("x", n=129), "x", "n is 129, must be at most 128"),
    (_chat("x", top_k=1.5), "x", "1.5"),
    (_chat("x", logit_bias={"9" * 30: 1}), "x", "logit_bias"),
    (_chat("x", stop_token_ids=[10**20]), "x", "stop_token_ids has 1000"),
    (_chat("x", messages=[{"role": "user", "content": "\ud800"}]), "x", "lone surrogate"),
    (_chat("x", chat_template="{{ 1 / 0 }}"), "x", "chat template"),
    (_chat("x", chat_template="{% for %}"), "x", "chat template"),
    (_completion("x", ""), "x", "is empty"),
    (_completion("x", [1, 999]), "x", "has id 999"),
    (_completion("x", "a" * 600), "x", "600 tokens"),
    (_completion("x", ["a"] * 2049), "x", "at most 2048"),
    (_chat("good 1"), "good 1", "is that of line"),
]


def test_a_broken_line_is_its_own_error_and_harms_no_other(llm: infer.LLM) -> None:
    lines = [line for line, _, _ in BROKEN]
    data = _data(_chat("good 1", temperature=0), *_apart(lines), _chat("good 2", temperature=0))
    found = _answers(llm, data)
    assert len(found) == len(lines) + 2
    by_line = {line.id: line.number for line in read_lines(data, "m")}
    for answer in found:
        number = by_line[answer["id"]]
        if 2 <= number <= len(lines) + 1:
            _, custom_id, message = BROKEN[number - 2]
            error = answer["error"]
            assert error["message"].startswith(f"line {number}: ")
            assert message in error["message"], (error, message)
            assert error["code"] == "invalid_request_error"
            assert (answer["custom_id"] is None) == (custom_id is None)
            assert answer["response"]["status_code"] == 400
            assert answer["response"]["body"]["error"]["message"] == error["message"]
        else:
            assert answer["error"] is None
            assert answer["response"]["status_code"] == 200


def _apart(lines: list[Any]) -> list[Any]:
    """The lines with a custom_id of their own, but for the one that repeats another's."""
    return [
        line | {"custom_id": f"x{i}"}
        if isinstance(line, dict) and line.get("custom_id") == "x"
        else line
        for i, line in enumerate(lines)
    ]


def test_chunks_run_one_program_and_chunking_changes_nothing(
    llm: infer.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = _data(
        *[_chat(f"a{i}", "x" * (3 * i), temperature=0, max_tokens=3 + i) for i in range(12)],
        _completion("b", temperature=0.7, seed=1, n=11),
        _completion("c", temperature=0.7, logprobs=2, seed=8),
    )
    before = num_traces("generate")
    whole = {a["custom_id"]: a["response"] for a in _answers(llm, data)}
    assert num_traces("generate") == before + 1
    ids = [line.id for line in read_lines(data, "m")]
    rest = _answers(llm, data, done=set(ids[::2]))
    assert {a["id"] for a in rest} == set(ids[1::2])
    assert num_traces("generate") == before + 1
    for answer in rest:
        assert _untimed(answer["response"]) == _untimed(whole[answer["custom_id"]])


def _untimed(response: dict[str, Any]) -> dict[str, Any]:
    return response | {"body": response["body"] | {"created": 0}}


def test_a_default_seed_gives_every_line_its_own(llm: infer.LLM) -> None:
    hot = dict(temperature=2.0, ignore_eos=True)
    data = _data(_chat("a", **hot), _chat("b", **hot), _chat("c", **hot, seed=5))
    texts = lambda **d: [
        a["response"]["body"]["choices"][0]["message"]["content"] for a in _answers(llm, data, **d)
    ]
    first, again, other = texts(seed=1), texts(seed=1), texts(seed=2)
    assert first == again
    assert first[0] != first[1]
    assert first[0] != other[0]
    assert first[2] == other[2]


def _opened(path: Path, data: bytes) -> tuple[set[str], list[str]]:
    lines = read_lines(data, "m")
    file = AnswerFile(path, lines)
    file.close()
    return file.done, [line.id for line in lines]


def test_a_torn_line_is_dropped_and_whole_ones_are_done(tmp_path: Path) -> None:
    data, path = _data(_chat("a"), _chat("b")), tmp_path / "out"
    _, (first, second) = _opened(path, data)
    whole = answer_line({"id": first, "custom_id": "a"})
    torn = answer_line({"id": second, "custom_id": "b"})
    for cut in (0, 1, 5, 17, 30, 49, len(torn) - 1):
        path.write_bytes(whole + torn[:cut])
        assert _opened(path, data)[0] == {first}
        assert path.read_bytes() == whole
    path.write_bytes(whole + torn)
    assert _opened(path, data)[0] == {first, second}


@pytest.mark.parametrize(
    "content",
    [
        b"my notes",
        b"my notes\n",
        b"\n",
        b'{"id": "batch_req_0123"}\n',
        b'{"id": "batch_req_0123", "custom_id": "a", "response": {}}',
        b'{"id": 3}\n',
        b"[]\n",
    ],
)
def test_a_file_of_something_else_is_refused_and_not_touched(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "out"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="line 1 answers no line of this input"):
        _opened(path, _data(_chat("a")))
    assert path.read_bytes() == content


def test_an_answer_of_another_input_or_twice_is_refused(tmp_path: Path) -> None:
    path, data = tmp_path / "out", _data(_chat("a"), _chat("b"))
    _, (first, _) = _opened(path, data)
    path.write_bytes(answer_line({"id": first}))
    with pytest.raises(ConfigError, match="line 1 answers no line"):
        _opened(path, _data(_chat("a", "other"), _chat("b")))
    assert _opened(path, data + _data(_chat("more")))[0] == {first}
    path.write_bytes(answer_line({"id": first}) * 2)
    with pytest.raises(ConfigError, match="line 2 answers no line"):
        _opened(path, data)


def test_two_processes_do_not_share_a_file(tmp_path: Path) -> None:
    lines = read_lines(_data(_chat("a")), "m")
    file = AnswerFile(tmp_path / "out", lines)
    with pytest.raises(ConfigError, match="being written by another process"):
        AnswerFile(tmp_path / "out", lines)
    file.close()
    AnswerFile(tmp_path / "out", lines).close()


def test_formats_are_told_apart() -> None:
    assert is_openai_batch(b"oops\n" + _data(_chat("a")))
    assert not is_openai_batch(_data({"prompt": 'say "custom_id"'}, b'the "custom_id" is', b""))


# As the command, with a pause after each chunk so that there is a middle to kill it in.
SLOW = """
import os, sys, time
from infer.serve.batch_file import AnswerFile
append = AnswerFile.append
def slow(self, answers):
    append(self, answers)
    time.sleep(float(os.environ.get("PAUSE_S", "0")))
AnswerFile.append = slow
from infer.cli.main import run
run()
"""


def _command(folder: Path, source: Path, out: Path, pause_s: float = 0) -> subprocess.Popen:
    options = ["--batch-file", str(source), "--out", str(out), "--num-slots", "2", "--json"]
    return subprocess.Popen(
        [sys.executable, "-c", SLOW, "generate", "--model", str(folder), *options],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PAUSE_S": str(pause_s)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_killed_run_resumes_without_losing_or_repeating_a_line(
    folder: Path, tmp_path: Path
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(
        _data(
            *[_chat(f"g{i}", "y" * i, temperature=0) for i in range(20)],
            b"{broken",
            *[_completion(f"s{i}", temperature=0.8, seed=i, logprobs=1) for i in range(12)],
        )
    )
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    uninterrupted = _command(folder, source, whole)
    printed, errors = uninterrupted.communicate(timeout=300)
    assert uninterrupted.returncode == 0, errors
    figures = json.loads(printed)
    assert (figures["answered"], figures["refused"], figures["skipped"]) == (32, 1, 0)

    for kills in (1, 2):
        process, before = _command(folder, source, out, pause_s=0.4), _num_lines(out)
        deadline = time.monotonic() + 120
        while _num_lines(out) < before + 9 and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert before + 9 <= _num_lines(out) < 33, kills
        # What a kill in the middle of a write leaves.
        with out.open("ab") as file:
            file.write(b'{"id": "batch_r')
    lines_before = out.read_bytes().rpartition(b"\n")[0]
    resumed = _command(folder, source, out)
    printed, errors = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, errors
    assert json.loads(printed)["skipped"] == lines_before.count(b"\n") + 1
    assert out.read_bytes().startswith(lines_before)
    found, expected = (
        [json.loads(line) for line in path.read_bytes().splitlines()] for path in (out, whole)
    )
    assert len({a["id"] for a in found}) == len(found) == 33
    key = lambda a: a["id"]
    for a, b in zip(sorted(found, key=key), sorted(expected, key=key), strict=True):
        assert a["custom_id"] == b["custom_id"]
        assert a["error"] == b["error"]
        assert _untimed(a["response"]) == _untimed(b["response"])

    done = _command(folder, source, out)
    printed, _ = done.communicate(timeout=60)
    assert json.loads(printed)["skipped"] == 33


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_the_command_refuses_what_does_not_go_together(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch_file, prompts = tmp_path / "in.jsonl", tmp_path / "prompts"
    batch_file.write_bytes(_data(_chat("a")))
    prompts.write_text("hello\n")
    args = ["generate", "--model", str(folder), "--batch-file"]
    for more, message in (
        ([str(batch_file), "--json"], "--json of a batch needs --out"),
        ([str(batch_file), "--chat"], "--chat and --logprobs are for prompts"),
        ([str(batch_file), "--out", str(batch_file)], "is the --batch-file itself"),
        ([str(prompts), "--out", str(tmp_path / "o")], "whose lines have a custom_id"),
    ):
        assert main([*args, *more]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_without_out_the_answers_go_to_standard_output(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("INFER_NO_COMPILE_CACHE", "1")
    batch_file = tmp_path / "in.jsonl"
    batch_file.write_bytes(_data(_chat("a", max_tokens=None), b"{"))
    args = ["generate", "--model", str(folder), "--batch-file", str(batch_file)]
    assert main([*args, "--temperature", "0", "--max-tokens", "3"]) == 0
    out, err = capsys.readouterr()
    refused, answered = map(json.loads, out.splitlines())
    assert refused["custom_id"] is None
    assert answered["response"]["body"]["usage"]["completion_tokens"] == 3
    assert err.startswith("1 answered, 1 refused in ")
