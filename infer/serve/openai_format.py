"""OpenAI's request and response bodies, from and to what `infer` takes and gives.  No JAX.

A body's fields are OpenAI's, and vLLM's extra sampling parameters beside them.  `null` is a field
left out.  A field that is known and not supported is refused by name, never ignored, but for those
in `IGNORED`, which change nothing of the answer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from infer.errors import RequestError
from infer.outputs import CompletionOutput, Logprob, RequestOutput

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
# Bookkeeping of OpenAI's own service.
IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
)
# Of the sampling parameters, those called alike in a body and in SamplingParams.
_ALIKE = (
    "n temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty seed "
    "stop stop_token_ids include_stop_str_in_output min_tokens ignore_eos bad_words "
    "allowed_token_ids skip_special_tokens"
).split()
_BOTH = {*_ALIKE, "model", "max_tokens", "logit_bias", "logprobs", "stream", *IGNORED}
_CHAT = _BOTH | {
    *("messages", "max_completion_tokens", "top_logprobs", "response_format"),
    *("add_generation_prompt", "chat_template", "chat_template_kwargs"),
}
_COMPLETION = _BOTH | {"prompt", "best_of", "echo"}
# Known to OpenAI or vLLM, and not here yet; the values that ask for nothing are fine.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_json": (),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "stream": (False,),
    "stream_options": (),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}
# OpenAI's JSON has no -inf; vLLM writes this.
_LEAST_LOGPROB = -9999.0


class BodyError(RequestError):
    """A body that cannot be served; `param` is the field that is wrong, None if it is the whole."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, kw_only=True)
class BodyRequest:
    """What a body asks for.

    Attributes:
        url: CHAT or COMPLETION.
        model: the name in the body.
        prompts: of a completion: strings and lists of ids; choices are numbered through them.
        messages: of a chat.
        template: keyword arguments of `apply_chat_template`.
        sampling: keyword arguments of SamplingParams.
        top_logprobs: how many alternatives the answer lists; None for no log-probabilities.
    """

    url: str
    model: str
    prompts: list[str | list[int]] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    template: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    top_logprobs: int | None = None


def read_body(url: Any, body: Any) -> BodyRequest:
    """Return what a request's body asks for; values of sampling parameters are checked later, by
    SamplingParams.

    Raises:
        BodyError: a field is missing, unknown, unsupported, or not of its kind.
    """
    if url not in (CHAT, COMPLETION):
        raise BodyError(f"url is {url!r:.80}; there are {CHAT!r} and {COMPLETION!r}", "url")
    if not isinstance(body, Mapping):
        raise BodyError(f"body is {_kind(body)}; it is a JSON object", "body")
    given = {name: value for name, value in body.items() if value is not None}
    _check_fields(given, _CHAT if url == CHAT else _COMPLETION)
    if not isinstance(given.get("model"), str):
        raise BodyError("model is missing; name the model as a string", "model")
    sampling = {name: given[name] for name in _ALIKE if name in given}
    if "logit_bias" in given:
        sampling["logit_bias"] = _logit_bias(given["logit_bias"])
    if url == CHAT:
        return _chat(given, sampling)
    if "max_tokens" in given:
        sampling["max_tokens"] = given["max_tokens"]
    top = given.get("logprobs")
    if isinstance(top, bool):
        raise BodyError("logprobs is a number of alternatives in a completion, 0 to 20", "logprobs")
    return BodyRequest(
        url=url,
        model=given["model"],
        prompts=_prompts(given.get("prompt")),
        sampling=sampling | ({} if top is None else {"logprobs": top}),
        top_logprobs=top,
    )


def _check_fields(given: Mapping[str, Any], known: set[str]) -> None:
    for name, value in given.items():
        if name in _UNSUPPORTED:
            if value not in _UNSUPPORTED[name]:
                raise BodyError(f"{name} is not supported yet; leave it out", name)
        elif name not in known:
            raise BodyError(f"unknown field {name!r}; known: {', '.join(sorted(known))}", name)


def _chat(given: Mapping[str, Any], sampling: dict[str, Any]) -> BodyRequest:
    # The newer name wins, as at OpenAI.
    for name in ("max_tokens", "max_completion_tokens"):
        if name in given:
            sampling["max_tokens"] = given[name]
    wanted = given.get("logprobs", False)
    if not isinstance(wanted, bool):
        raise BodyError(
            "logprobs is true or false in a chat; top_logprobs says how many alternatives",
            "logprobs",
        )
    if "top_logprobs" in given and not wanted:
        raise BodyError("top_logprobs needs logprobs: true", "top_logprobs")
    top = given.get("top_logprobs", 0) if wanted else None
    more = given.get("chat_template_kwargs", {})
    if not isinstance(more, Mapping) or {"messages", "tokenize"} & set(more):
        raise BodyError(
            "chat_template_kwargs is an object of further variables of the template",
            "chat_template_kwargs",
        )
    template = {n: given[n] for n in ("add_generation_prompt", "chat_template") if n in given}
    return BodyRequest(
        url=CHAT,
        model=given["model"],
        messages=_messages(given.get("messages")),
        template=template | dict(more),
        sampling=sampling | ({} if top is None else {"logprobs": top}),
        top_logprobs=top,
    )


def _messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise BodyError('messages is a list like [{"role": "user", "content": "..."}]', "messages")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise BodyError(f"messages[{i}] has no role", "messages")
    return [m | {"content": _content(m.get("content"), i)} for i, m in enumerate(messages)]


def _content(content: Any, index: int) -> str:
    """Return a message's text: a string, or parts of type "text" joined."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else _kind(part)
        if kind != "text" or not isinstance(part.get("text"), str):
            raise BodyError(
                f"messages[{index}].content has {kind!r:.40}; only text is supported", "messages"
            )
    return "".join(part["text"] for part in parts)


def _prompts(prompt: Any) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(map(_is_id, prompt)):
            return [prompt]
        if all(isinstance(p, str) or (isinstance(p, list) and all(map(_is_id, p))) for p in prompt):
            return list(prompt)
    raise BodyError("prompt is a string, a list of ids, or a list of these", "prompt")


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _logit_bias(bias: Any) -> dict[int, Any]:
    """Return the biases by id: JSON's keys are strings."""
    if not isinstance(bias, Mapping) or not all(
        str(k).isascii() and str(k).isdigit() for k in bias
    ):
        raise BodyError(
            'logit_bias is an object from ids to numbers, {"50256": -100}', "logit_bias"
        )
    return {int(token): value for token, value in bias.items()}


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def response_body(
    request: BodyRequest,
    outputs: Sequence[RequestOutput],
    *,
    request_id: str,
    created: int,
    model: str,
    token_bytes: Callable[[int], bytes],
) -> dict[str, Any]:
    """Return the completion object that answers `request`.

    Args:
        request: what was asked.
        outputs: one per prompt of it; choices are numbered prompt by prompt.
        request_id: the object's id.
        created: seconds since 1970.
        model: the name to report.
        token_bytes: of an id; OpenAI reports tokens as text and as bytes.
    """
    choices = []
    for output in outputs:
        for completion in output.outputs:
            choice: dict[str, Any] = {"index": len(choices)}
            if request.url == CHAT:
                choice["message"] = {"role": "assistant", "content": completion.text}
            else:
                choice["text"] = completion.text
            choice["logprobs"] = _logprobs(request, completion, token_bytes)
            choice["finish_reason"] = completion.finish_reason
            choice["stop_reason"] = completion.stop_reason
            choices.append(choice)
    num_prompt = sum(len(o.prompt_token_ids) for o in outputs)
    num_new = sum(len(c.token_ids) for o in outputs for c in o.outputs)
    return {
        "id": request_id,
        "object": "chat.completion" if request.url == CHAT else "text_completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
        },
    }


def error_body(message: str, param: str | None = None, *, server: bool = False) -> dict[str, Any]:
    """Return OpenAI's error object; `server` tells that it is no fault of the request."""
    kind = "server_error" if server else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


def _logprobs(
    request: BodyRequest, completion: CompletionOutput, token_bytes: Callable[[int], bytes]
) -> dict[str, Any] | None:
    if request.top_logprobs is None or completion.logprobs is None:
        return None
    entries = list(zip(completion.token_ids, completion.logprobs, strict=True))
    top = request.top_logprobs
    if request.url == CHAT:
        item = lambda token, entry: _chat_token(token_bytes(token), entry)
        return {
            "content": [
                item(token, entry[token])
                | {"top_logprobs": [item(t, e) for t, e in _likeliest(entry, top)]}
                for token, entry in entries
            ],
            "refusal": None,
        }
    text = lambda token: token_bytes(token).decode(errors="replace")
    tokens, offsets, offset = [text(token) for token, _ in entries], [], 0
    for piece in tokens:
        offsets.append(offset)
        offset += len(piece)
    return {
        "tokens": tokens,
        "token_logprobs": [_floor(entry[token].logprob) for token, entry in entries],
        # OpenAI's has the drawn token too, where it is none of the likeliest.
        "top_logprobs": [{text(t): _floor(e.logprob) for t, e in x.items()} for _, x in entries]
        if top
        else None,
        "text_offset": offsets,
    }


def _likeliest(entry: Mapping[int, Logprob], count: int) -> list[tuple[int, Logprob]]:
    ranked = [(token, e) for token, e in entry.items() if e.rank is not None and e.rank <= count]
    return sorted(ranked, key=lambda pair: pair[1].rank or 0)


def _chat_token(piece: bytes, entry: Logprob) -> dict[str, Any]:
    text = piece.decode(errors="replace")
    return {"token": text, "logprob": _floor(entry.logprob), "bytes": list(piece)}


def _floor(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
