"""`SamplingParams`: how one request is sampled, checked when it is made."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from infer.errors import RequestError

# OpenAI's limit on the entries of logit_bias.
MAX_BIAS_ENTRIES = 300


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled; names, defaults and ranges are vLLM's.

    Attributes:
        n: parallel samples of the prompt; sample c draws with its own keys.
        temperature: 0 is greedy; at least 0.
        top_k: keep the k likeliest tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of likeliest tokens whose mass reaches top_p; in (0, 1].
        min_p: keep tokens at least min_p times as likely as the likeliest; in [0, 1].
        presence_penalty: taken from the logit of each token generated so far; -2 to 2.
        frequency_penalty: taken once for each time a token was generated; -2 to 2.
        repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt
            or generated; over 0, 1 changes nothing.
        seed: makes the request reproducible by itself, whatever its batch; 0 <= seed < 2**63, None
            for the call's key.
        max_tokens: most tokens to generate; at least 1.
        min_tokens: no stop token ends the request before so many tokens; stop tokens cannot be
            drawn until then.
        stop: strings that end the request; the text is cut before the first that appears.
        include_stop_str_in_output: cut after it instead.
        stop_token_ids: ids that end the request, besides the model's own; the id is part of the
            output.
        ignore_eos: go on past the model's own end-of-sequence ids.
        bad_words: strings, or sequences of ids, that must not be generated.
        allowed_token_ids: the only ids that may be drawn; None allows all.
        logit_bias: {id: number added to its logit}, each -100 to 100, at most 300 entries.
        logprobs: how many top log-probabilities to return per token beside the drawn token's own; 0
            to 20, None for none.
        prompt_logprobs: the same for the prompt's tokens.
        skip_special_tokens: leave special tokens out of the text.
    """

    n: int = 1
    temperature: float | int = 1.0
    top_k: int = 0
    top_p: float | int = 1.0
    min_p: float | int = 0.0
    presence_penalty: float | int = 0.0
    frequency_penalty: float | int = 0.0
    repetition_penalty: float | int = 1.0
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    bad_words: Sequence[str | Sequence[int]] = ()
    allowed_token_ids: Sequence[int] | None = None
    logit_bias: Mapping[int, float | int] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        freeze = lambda name, value: object.__setattr__(self, name, value)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} is {getattr(self, name)!r}, must be True or False")
        for name in ("stop", "stop_token_ids", "bad_words"):
            if not isinstance(getattr(self, name), Sequence):
                raise RequestError(f"{name} is {getattr(self, name)!r}, must be a sequence")
        for text in () if isinstance(self.stop, str) else self.stop:
            if not isinstance(text, str):
                raise RequestError(f"stop has {text!r}, must be strings; ids go to stop_token_ids")
        for word in self.bad_words:
            if not isinstance(word, Sequence):
                raise RequestError(f"bad_words has {word!r}, must be strings or sequences of ids")
        freeze("stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        freeze("stop_token_ids", tuple(self.stop_token_ids))
        words = [w if isinstance(w, str) else tuple(w) for w in self.bad_words]
        freeze("bad_words", tuple(words))
        if self.allowed_token_ids is not None:
            if not isinstance(self.allowed_token_ids, Sequence):
                raise RequestError(
                    f"allowed_token_ids is {self.allowed_token_ids!r}, must be a sequence of ids"
                )
            freeze("allowed_token_ids", tuple(self.allowed_token_ids))
        _check_int("n", self.n, 1, None, "ask for at least one sample")
        _check_number("temperature", self.temperature, 0, math.inf, "0 is greedy")
        _check_number("top_p", self.top_p, 0, 1, "1 keeps every token", open_low=True)
        _check_number("min_p", self.min_p, 0, 1, "0 keeps every token")
        _check_number("presence_penalty", self.presence_penalty, -2, 2, "0 is off")
        _check_number("frequency_penalty", self.frequency_penalty, -2, 2, "0 is off")
        _check_number(
            "repetition_penalty", self.repetition_penalty, 0, math.inf, "1 is off", open_low=True
        )
        _check_int("top_k", self.top_k, -1, None, "0 or -1 keeps every token")
        _check_int("max_tokens", self.max_tokens, 1, None, "ask for at least one token")
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens, "it cannot exceed max_tokens")
        if self.seed is not None:
            _check_int("seed", self.seed, 0, 2**63 - 1, "None takes the call's key")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, 20, "None returns no alternatives")
        for name in ("stop_token_ids", "allowed_token_ids"):
            for token in getattr(self, name) or ():
                _check_int(name, token, 0, None, "ids are those of the tokenizer")
        self._check_words()

    def _check_words(self) -> None:
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids is empty, must name an id; None allows all")
        for name in ("stop", "bad_words"):
            if any(len(text) == 0 for text in getattr(self, name)):
                raise RequestError(f"{name} has an empty entry, must be at least one character")
        if len(self.logit_bias) > MAX_BIAS_ENTRIES:
            raise RequestError(
                f"logit_bias has {len(self.logit_bias)} entries, must be at most {MAX_BIAS_ENTRIES}"
            )
        for token, bias in self.logit_bias.items():
            _check_int("logit_bias", token, 0, None, "its keys are ids of the tokenizer")
            _check_number("logit_bias", bias, -100, 100, "0 changes nothing")


def _check_number(
    name: str, value: Any, low: float, high: float, hint: str, open_low: bool = False
) -> None:
    bracket = "(" if open_low else "["
    rule = f"must be a finite number in {bracket}{low}, {high}]; {hint}"
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(
        value, bool
    )
    if not is_number or not math.isfinite(value):
        raise RequestError(f"{name} is {value!r}, {rule}")
    if not (low < value if open_low else low <= value) or value > high:
        raise RequestError(f"{name} is {value!r}, {rule}")


def _check_int(name: str, value: Any, low: int, high: int | None, hint: str) -> None:
    rule = f"must be an integer of at least {low}" + (
        f" and at most {high}" if high is not None else ""
    )
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise RequestError(f"{name} is {value!r}, {rule}; {hint}")
    if value < low or (high is not None and value > high):
        raise RequestError(f"{name} is {value!r}, {rule}; {hint}")
