"""`infer chat` from a pipe and at a terminal."""

import sys
from typing import Any

import pytest

import infer
from infer.cli.chat import Conversation
from infer.cli.main import main
from infer.errors import RequestError
from tests.cli.conftest import FakeModel, FakeTokenizer, Terminal


def prompts(model: FakeModel) -> list[str]:
    return [bytes(ids).decode() for ids, _, _ in model.calls]


def test_history_grows_and_reset_forgets(
    model: FakeModel, stdin: Any, capsys: pytest.CaptureFixture[str]
):
    stdin(b"one\n\ntwo\n/reset\nthree\n/exit\nnever\n")
    assert main(["chat", "--model", "m", "--system", "be brief"]) == 0
    assert prompts(model) == [
        "system:be brief|user:one",
        "system:be brief|user:one|assistant:Hello|user:two",
        "system:be brief|user:three",
    ]
    assert capsys.readouterr() == ("Hello\nHello\nHello\n", "")


def test_unknown_command(model: FakeModel, stdin: Any, capsys: pytest.CaptureFixture[str]):
    stdin(b"/help\n/etc/hosts is what\n")
    assert main(["chat", "--model", "m"]) == 0
    assert prompts(model) == ["user:/etc/hosts is what"]
    assert "unknown command /help: /reset forgets" in capsys.readouterr().err


def test_no_template_says_the_way_out(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(FakeTokenizer, "chat_template", None)
    assert main(["chat", "--model", "base"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("infer: base has no chat template")
    assert "`infer generate --model base`" in message


def test_an_error_ends_a_piped_conversation(
    model: FakeModel, stdin: Any, capsys: pytest.CaptureFixture[str]
):
    model.raises = RequestError("the prompt has 9000 tokens, the context 8192")
    stdin(b"one\ntwo\n")
    assert main(["chat", "--model", "m"]) == 2
    assert len(model.calls) == 1
    assert "9000 tokens" in capsys.readouterr().err


class Keyboard:
    """Lines that a person types; an exception is a key like Ctrl-C."""

    def __init__(self, *keys: str | BaseException) -> None:
        self.keys = list(keys)

    def __call__(self, prompt: str) -> str:
        key = self.keys.pop(0) if self.keys else EOFError()
        if isinstance(key, BaseException):
            raise key
        return key


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A terminal at which the given keys are typed."""

    def typing(*keys: str | BaseException) -> None:
        monkeypatch.setattr(sys, "stdin", Terminal(sys.stdin))
        monkeypatch.setattr(sys, "stdout", Terminal(sys.stdout))
        monkeypatch.setattr("builtins.input", Keyboard(*keys))

    return typing


def test_ctrl_c_stops_the_reply_and_keeps_its_beginning(
    model: FakeModel, terminal: Any, capsys: pytest.CaptureFixture[str]
):
    terminal("one", KeyboardInterrupt(), "/exit")
    model.raises = KeyboardInterrupt()
    talk = Conversation(model, None, None)
    talk.run()
    assert [m["content"] for m in talk.messages] == ["one", "Hello"]
    out, err = capsys.readouterr()
    assert out.startswith("Hello")
    assert "(stopped)" in err
    assert "(/exit or Ctrl-D ends)" in err


def test_an_error_at_a_terminal_drops_the_message_and_goes_on(
    model: FakeModel, terminal: Any, capsys: pytest.CaptureFixture[str]
):
    terminal("too long", EOFError())
    model.raises = RequestError("the prompt has 9000 tokens")
    talk = Conversation(model, None, "sys")
    talk.run()
    assert talk.messages == [{"role": "system", "content": "sys"}]
    assert "9000 tokens (/reset starts anew)" in capsys.readouterr().err


def test_a_drafter_and_the_caches_dtype_reach_every_reply(model: FakeModel, stdin: Any):
    stdin(b"one\ntwo\n")
    options = ["--draft", "ngram:3", "--kv-dtype", "int8", "--implementation", "xla"]
    assert main(["chat", "--model", "m", *options]) == 0
    given = {"draft": infer.spec.NGram(k=3), "kv_dtype": "int8", "implementation": "xla"}
    assert [{name: more[name] for name in given} for _, _, more in model.calls] == [given, given]


def test_an_unknown_drafter_is_refused_before_the_model_loads(
    model: Any, capsys: pytest.CaptureFixture[str]
):
    assert main(["chat", "--model", "m", "--draft", "medusa"]) == 2
    assert "no drafter 'medusa'" in capsys.readouterr().err and not model.loads
