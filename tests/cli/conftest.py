"""A stand-in for the Python API, so that the command line is tested without compiling anything."""

import dataclasses
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import infer
from infer.errors import RequestError


@dataclasses.dataclass(frozen=True, kw_only=True)
class FakeParams:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 16

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise RequestError(f"temperature is {self.temperature}, must be at least 0")


class FakeTokenizer:
    chat_template: str | None = "{{ messages }}"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def apply_chat_template(
        self, messages: list[dict[str, str]], add_generation_prompt: bool
    ) -> list[int]:
        assert add_generation_prompt
        return self.encode("|".join(f"{m['role']}:{m['content']}" for m in messages))


class FakeModel:
    """Answers a prompt with its words backwards."""

    def __init__(self) -> None:
        self.tokenizer = FakeTokenizer()
        self.calls: list[tuple[Any, Any, dict[str, Any]]] = []
        self.raises: BaseException | None = None

    def generate(self, prompts: list[str], sampling: Any = None, **options: Any) -> Any:
        self.calls.append((prompts, sampling, options))
        if self.raises is not None:
            raise self.raises
        as_text = [p if isinstance(p, str) else bytes(p).decode() for p in prompts]
        texts = [" " + " ".join(reversed(p.split())) for p in as_text]
        lengths = [len(t.encode()) for t in texts]
        tokens = np.full((len(texts), max(lengths)), 255, np.int32)
        for row, text in enumerate(texts):
            tokens[row, : lengths[row]] = list(text.encode())
        return types.SimpleNamespace(
            tokens=tokens,
            lengths=np.asarray(lengths, np.int32),
            logprobs=np.full(tokens.shape, -0.5, np.float32),
            finish_reason=["length"] * len(texts),
            text=texts,
            stats={
                "compile_s": 1.5,
                "ttft_s": 0.25,
                "decode_tokens_per_s": 42.0,
                "prefill_tokens_per_s": None,
                "compiles": 1,
                "implementation": "xla",
                "implementations": {"linear": "xla"},
                "backend": "cpu",
                "num_prompt_tokens": [len(p) for p in prompts],
                "num_output_tokens": lengths,
            },
        )

    def stream(self, prompt: str | list[int], sampling: Any = None, **options: Any) -> "FakeStream":
        self.calls.append((prompt, sampling, options))
        return FakeStream(self.raises)


class FakeStream:
    """Two pieces, and a state that is the same for all."""

    state = "said so far"

    def __init__(self, raises: BaseException | None) -> None:
        self.pieces = iter(["Hel", "lo"])
        self.raises = raises

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        try:
            return next(self.pieces)
        except StopIteration:
            if self.raises is not None:
                raise self.raises from None
            raise


class Terminal:
    """A text stream that says it is a terminal."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def isatty(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> FakeModel:
    """The model that every name loads."""
    fake = FakeModel()
    fake.loads = []  # type: ignore[attr-defined]

    def load(name: str, **options: Any) -> FakeModel:
        fake.loads.append((name, options))  # type: ignore[attr-defined]
        return fake

    # Not setattr: that would import the real ones first.
    monkeypatch.setitem(vars(infer), "load", load)
    monkeypatch.setitem(vars(infer), "SamplingParams", FakeParams)
    monkeypatch.setenv("INFER_NO_COMPILE_CACHE", "1")
    monkeypatch.setenv("INFER_NATIVE", "0")  # or a machine without a compiler would say so
    monkeypatch.setenv("INFER_CACHE", str(tmp_path / "cache"))
    return fake


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set what standard input holds."""
    import io

    def hold(data: bytes) -> None:
        stream = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", stream)

    return hold
