"""OpenAI's bodies: what is read, refused and answered."""

from typing import Any

import pytest

from infer.outputs import CompletionOutput, Logprob, RequestOutput
from infer.serve.openai_format import (
    CHAT,
    COMPLETION,
    BodyError,
    error_body,
    read_body,
    response_body,
)

USER = [{"role": "user", "content": "hi"}]
# Token 7 is the first byte of a character of two.
BYTES = {5: b"he", 6: b"llo", 7: b"\xc3", 8: b" x"}


def _output(*texts: str, logprobs: Any = None) -> RequestOutput:
    outputs = [
        CompletionOutput(i, text, [5, 7], -1.5, logprobs, "stop", None)
        for i, text in enumerate(texts)
    ]
    return RequestOutput("0", None, [1, 2, 3], None, outputs)


def _answer(request: Any, *outputs: RequestOutput) -> dict[str, Any]:
    return response_body(
        request, outputs, request_id="x-1", created=9, model="m", token_bytes=BYTES.__getitem__
    )


def test_a_chat_body_becomes_sampling_and_template_arguments() -> None:
    body = {
        "model": "m",
        "messages": [
            {"role": "system", "content": "s", "name": "n"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
        ],
        "max_tokens": 3,
        "max_completion_tokens": 4,
        "temperature": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "stop": ["x"],
        "logit_bias": {"5": -1},
        "logprobs": True,
        "top_logprobs": 2,
        "seed": None,
        "user": "u",
        "stream": False,
        "tools": [],
        "response_format": {"type": "text"},
        "chat_template_kwargs": {"enable_thinking": False},
    }
    found = read_body(CHAT, body)
    assert found.messages == [
        {"role": "system", "content": "s", "name": "n"},
        {"role": "user", "content": "ab"},
    ]
    assert found.sampling == {
        "max_tokens": 4,
        "temperature": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "stop": ["x"],
        "logit_bias": {5: -1},
        "logprobs": 2,
    }
    assert found.template == {"enable_thinking": False}
    assert (found.model, found.top_logprobs) == ("m", 2)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_prompts_of_a_completion(prompt: Any, prompts: Any) -> None:
    found = read_body(COMPLETION, {"model": "m", "prompt": prompt, "logprobs": 0})
    assert (found.prompts, found.sampling, found.top_logprobs) == (prompts, {"logprobs": 0}, 0)


@pytest.mark.parametrize(
    ("url", "change", "param", "message"),
    [
        (CHAT, {"tools": [{}]}, "tools", "not supported yet"),
        (CHAT, {"stream": True}, "stream", "not supported yet"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        (CHAT, {"temprature": 1}, "temprature", "unknown field 'temprature'; known: add_gen"),
        (CHAT, {"prompt": "x"}, "prompt", "unknown field 'prompt'"),
        (CHAT, {"messages": []}, "messages", "is a list like"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages", r"messages\[0\] has no role"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages",
            "'image_url'; only",
        ),
        (CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages", "only text"),
        (CHAT, {"logprobs": 3}, "logprobs", "true or false"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs", "needs logprobs: true"),
        (CHAT, {"logit_bias": {"a": 1}}, "logit_bias", "from ids to numbers"),
        (CHAT, {"model": None}, "model", "model is missing"),
        (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "further"),
        (COMPLETION, {"messages": USER}, "messages", "unknown field 'messages'"),
        (COMPLETION, {"messages": None, "prompt": [1, "a"]}, "prompt", "a list of ids"),
        (COMPLETION, {"messages": None, "prompt": []}, "prompt", "a list of ids"),
        (COMPLETION, {"messages": None, "prompt": "x", "echo": True}, "echo", "not supported"),
        (COMPLETION, {"messages": None, "prompt": "x", "best_of": 2}, "best_of", "not supported"),
        (COMPLETION, {"messages": None, "prompt": "x", "logprobs": True}, "logprobs", "a number"),
        ("/v1/embeddings", {}, "url", "there are '/v1/chat"),
    ],
)
def test_what_cannot_be_served_is_named(
    url: str, change: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(BodyError, match=message) as caught:
        read_body(url, {"model": "m", "messages": USER} | change)
    assert caught.value.param == param


def test_a_chat_answer_by_hand() -> None:
    entries = [
        {5: Logprob(-0.5, 2), 6: Logprob(-0.25, 1), 8: Logprob(-3.0, 3)},
        {7: Logprob(float("-inf"), None), 6: Logprob(-0.125, 1), 8: Logprob(-4.0, 2)},
    ]
    request = read_body(CHAT, {"model": "q", "messages": USER, "logprobs": True, "top_logprobs": 1})
    found = _answer(request, _output("A", "B", logprobs=entries))
    assert found["choices"][1]["message"] == {"role": "assistant", "content": "B"}
    first = found.pop("choices")[0]
    assert found == {
        "id": "x-1",
        "object": "chat.completion",
        "created": 9,
        "model": "m",
        "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
    }
    llo = {"token": "llo", "logprob": -0.25, "bytes": [108, 108, 111]}
    assert first == {
        "index": 0,
        "message": {"role": "assistant", "content": "A"},
        "finish_reason": "stop",
        "stop_reason": None,
        "logprobs": {
            "refusal": None,
            "content": [
                {"token": "he", "logprob": -0.5, "bytes": [104, 101], "top_logprobs": [llo]},
                {
                    "token": "�",
                    "logprob": -9999.0,
                    "bytes": [0xC3],
                    "top_logprobs": [llo | {"logprob": -0.125}],
                },
            ],
        },
    }


def test_a_completion_answer_by_hand() -> None:
    entries = [{5: Logprob(-0.5, 1)}, {7: Logprob(-2.0, None), 6: Logprob(-0.125, 1)}]
    request = read_body(COMPLETION, {"model": "q", "prompt": ["a", "b"], "logprobs": 1})
    found = _answer(request, _output("A", logprobs=entries), _output("B", logprobs=entries))
    assert found["object"] == "text_completion"
    assert [(c["index"], c["text"]) for c in found["choices"]] == [(0, "A"), (1, "B")]
    assert found["usage"] == {"prompt_tokens": 6, "completion_tokens": 4, "total_tokens": 10}
    assert found["choices"][0]["logprobs"] == {
        "tokens": ["he", "�"],
        "token_logprobs": [-0.5, -2.0],
        "top_logprobs": [{"he": -0.5}, {"�": -2.0, "llo": -0.125}],
        "text_offset": [0, 2],
    }
    plain = read_body(COMPLETION, {"model": "q", "prompt": "a"})
    assert _answer(plain, _output("A", logprobs=entries))["choices"][0]["logprobs"] is None


def test_openais_client_takes_the_answers() -> None:
    types = pytest.importorskip("openai.types")
    entries = [{5: Logprob(-0.5, 1)}, {7: Logprob(-2.0, None), 6: Logprob(-0.125, 1)}]
    chat = read_body(CHAT, {"model": "q", "messages": USER, "logprobs": True, "top_logprobs": 1})
    text = read_body(COMPLETION, {"model": "q", "prompt": "a", "logprobs": 1})
    found = types.chat.ChatCompletion.model_validate(
        _answer(chat, _output("A", logprobs=entries)), strict=True
    )
    assert found.choices[0].logprobs.content[0].top_logprobs[0].token == "he"
    plain = types.Completion.model_validate(
        _answer(text, _output("A", logprobs=entries)), strict=True
    )
    assert plain.choices[0].logprobs.token_logprobs == [-0.5, -2.0]


def test_errors_are_openais() -> None:
    assert error_body("m", "p") == {
        "error": {"message": "m", "type": "invalid_request_error", "param": "p", "code": None}
    }
    assert error_body("m", server=True)["error"]["type"] == "server_error"
