"""`LLM`: vLLM's names and shapes over what `generate` computes."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import infer
from infer import LLM, SamplingParams
from infer.compiling import num_traces
from infer.errors import ConfigError, RequestError
from infer.generation.prepare import RunOptions
from infer.models.params import weight_form
from infer.native.repack import Packed
from infer.quant.blocks import FORMATS
from infer.quant.qarray import QArray
from tests.models import tiny_folder

GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(tiny_folder.write(tmp_path_factory.mktemp("m") / "tiny"), num_slots=4)


def test_outputs_are_generates_in_vllms_shape(llm: LLM) -> None:
    params, tokenizer = llm.model.params, llm.get_tokenizer()
    asked = SamplingParams(temperature=0.9, seed=5, n=2, logprobs=3, max_tokens=6)
    plain = infer.generate(
        params, ["hello", "a b"], tokenizer=tokenizer, sampling=asked, num_slots=4
    )
    first, second = llm.generate(["hello", "a b"], asked)
    assert (first.prompt, first.prompt_token_ids) == ("hello", tokenizer.encode("hello"))
    assert int(second.request_id) == int(first.request_id) + 1
    for p, output in enumerate([first, second]):
        assert output.finished and output.prompt_logprobs is None
        assert [c.index for c in output.outputs] == [0, 1]
        for c, found in enumerate(output.outputs):
            row = 2 * p + c
            n = len(found.token_ids)
            assert found.token_ids == plain.token_ids(row)
            assert found.text == plain.text[row]
            assert math.isclose(
                found.cumulative_logprob, plain.logprobs[row, :n].sum(), rel_tol=1e-5
            )
            assert found.finish_reason == plain.finish_reason[row]
            assert found.logprobs is not None and len(found.logprobs) == n
            for i, entry in enumerate(found.logprobs):
                token = found.token_ids[i]
                assert next(iter(entry)) == token
                assert entry[token].logprob == float(plain.logprobs[row, i])
                top = plain.top_tokens[row, i].tolist()
                assert set(entry) == {token, *top}
                assert [entry[t].rank for t in top] == [1, 2, 3]
                assert entry[token].rank is None or token in top
                assert entry[token].decoded_token == tokenizer.token_bytes(token).decode(
                    errors="replace"
                )


def test_prompts_come_in_every_form(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("hello")
    outputs = llm.generate(
        [
            "hello",
            ids,
            {"prompt": "hello"},
            {"prompt_token_ids": ids},
            {"prompt": "x", "prompt_token_ids": ids},
        ],
        GREEDY,
    )
    assert [o.prompt for o in outputs] == ["hello", None, "hello", None, None]
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 1
    assert llm.generate("hello", GREEDY)[0].outputs == outputs[0].outputs
    assert llm.generate({"prompt_token_ids": ids}, GREEDY)[0].outputs == outputs[0].outputs


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([1, 2, 3], "flat list of ids"),
        ([{"text": "x"}], "prompt 0 has 'text'"),
        ([{}], "prompt 0 has neither"),
        ([{"prompt": [1]}], "'prompt' is text"),
        ([{"prompt_token_ids": "x"}], "'prompt_token_ids' a list of ids"),
        (["x", ""], "prompt 1 is empty"),
        (7, "prompts is a int"),
        ([], "prompts is empty"),
    ],
)
def test_prompts_that_are_none_are_refused(llm: LLM, prompts: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, GREEDY)


def test_one_sampling_a_prompt_and_the_default_is_vllms(llm: LLM) -> None:
    each = [GREEDY, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)]
    outputs = llm.generate(["hello", "hello"], each)
    assert outputs[1].outputs[0].token_ids == outputs[0].outputs[0].token_ids[:2]
    assert outputs[1].outputs[0].finish_reason == "length"
    assert len(llm.generate("hello")[0].outputs[0].token_ids) <= 16
    with pytest.raises(RequestError, match="2 SamplingParams for 1 prompts"):
        llm.generate(["hello"], each)


def test_calls_draw_anew_and_a_new_llm_repeats_them(llm: LLM) -> None:
    hot = SamplingParams(temperature=2.0, max_tokens=8, ignore_eos=True)
    texts = []
    for _ in range(2):
        fresh = LLM(llm.model, num_slots=4, seed=7)
        texts.append([fresh.generate("hello", hot)[0].outputs[0].token_ids for _ in range(2)])
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]


def test_stop_reasons_are_vllms(llm: LLM) -> None:
    free = llm.generate("hello", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    third = free[0].outputs[0].token_ids[2]
    at = free[0].outputs[0].token_ids.index(third)
    run = lambda **more: llm.generate("hello", SamplingParams(temperature=0, max_tokens=8, **more))[
        0
    ].outputs[0]
    by_id = run(stop_token_ids=[third], ignore_eos=True)
    assert (by_id.finish_reason, by_id.stop_reason) == ("stop", third)
    assert by_id.token_ids == free[0].outputs[0].token_ids[: at + 1]
    # The model's own end: biased so that it is drawn at once.
    own = run(logit_bias={265: 100})
    assert (own.finish_reason, own.stop_reason, own.token_ids) == ("stop", None, [265])
    assert own.text == ""
    text = free[0].outputs[0].text
    by_text = run(stop=text[1], ignore_eos=True)
    assert (by_text.finish_reason, by_text.stop_reason) == ("stop", text[1])
    assert by_text.text == text[: text.index(text[1])]


def test_chat_renders_the_template(llm: LLM) -> None:
    user = [{"role": "user", "content": "hi"}]
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    (one,) = llm.chat(user, GREEDY)
    assert one.prompt == prompt
    assert one.prompt_token_ids == llm.get_tokenizer().apply_chat_template(user)
    two = llm.chat([user, user], GREEDY)
    assert [o.outputs[0] for o in two] == [one.outputs[0]] * 2
    assert llm.chat(user, GREEDY, add_generation_prompt=False)[0].prompt == prompt[:-22]
    own = "{{ x }}:{{ messages[0].content }}"
    (rendered,) = llm.chat(user, GREEDY, chat_template=own, chat_template_kwargs={"x": 1})
    assert rendered.prompt == "1:hi"
    with pytest.raises(RequestError, match="messages is"):
        llm.chat([])


def test_prompt_logprobs_and_score_are_the_models(llm: LLM) -> None:
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
    (output,) = llm.generate("hello you", asked)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    ids = output.prompt_token_ids
    expected = np.asarray(infer.score(llm.model.params, jnp.asarray([ids])))[0]
    found = [e[t].logprob for e, t in zip(output.prompt_logprobs[1:], ids[1:], strict=True) if e]
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert all(len(entry or {}) in (2, 3) for entry in output.prompt_logprobs[1:])
    (scores,) = llm.score("hello you")
    assert scores[0] is None
    np.testing.assert_allclose(scores[1:], expected, atol=1e-4)  # type: ignore[arg-type]


def test_a_bar_counts_requests_and_changes_nothing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    import contextlib

    counts: list[int] = []

    @contextlib.contextmanager
    def bar(what: str, total: int):
        assert (what, total) == ("requests", 6)
        yield counts.append

    plain = llm.generate(["hello"] * 6, GREEDY)
    monkeypatch.setattr("infer.llm.counting_bar", bar)
    watched = llm.generate(["hello"] * 6, GREEDY)
    assert [o.outputs for o in watched] == [o.outputs for o in plain]
    assert counts == sorted(counts) and counts[-1] == 6
    del counts[:]
    llm.generate(["hello"] * 6, GREEDY, use_tqdm=False)
    assert counts == []


def test_calls_with_room_for_a_series_share_one_program(llm: LLM) -> None:
    encode = llm.get_tokenizer().encode
    series = [
        (encode("hello"), GREEDY),
        (encode("hello " * 20), SamplingParams(temperature=0, max_tokens=40, logprobs=2)),
        (encode("x"), SamplingParams(seed=1, logit_bias={3: 1.0}, bad_words=["yy"])),
    ]
    room = llm.room_for(series, 4)
    options = RunOptions(num_slots=2, room=room)
    run = lambda *which: llm.run(
        [series[i][0] for i in which], [None] * len(which), [series[i][1] for i in which], options
    )
    before = num_traces("generate")
    together = run(0, 1, 2)
    apart = [run(i)[0] for i in range(3)]
    assert num_traces("generate") <= before + 1
    assert [o.outputs for o in together] == [o.outputs for o in apart]


def test_options_that_are_none_are_refused(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="LLM has no option slots"):
        LLM(llm.model, slots=3)
    with pytest.raises(ConfigError, match="loaded already"):
        LLM(llm.model, dtype="float32")
    with pytest.raises(RequestError, match="num_slots is 0"):
        LLM(llm.model, num_slots=0)


def test_figures_of_the_last_call(tmp_path: Path) -> None:
    llm = LLM(tiny_folder.write(tmp_path / "tiny"), packed=False)
    assert (llm.stats, llm.implementation) == ({}, None)
    llm.generate("hello", GREEDY)
    (first,) = llm.stats["num_output_tokens"]
    assert first == len(llm.generate("hello", GREEDY)[0].outputs[0].token_ids)
    assert llm.stats["implementations"]["linear"] == "xla"
    assert llm.implementation == llm.stats["implementation"]
    llm.score(["hello", "you"])
    assert len(llm.stats["num_prompt_tokens"]) == 2


def test_the_form_of_the_weights_is_shown(tmp_path: Path) -> None:
    llm = LLM(tiny_folder.write(tmp_path / "tiny"), packed=False)
    assert repr(llm).startswith("LLM(Model(") and repr(llm).endswith(", float32))")
    params = llm.model.params
    embed = QArray.create(np.zeros((64, 36), np.uint8), FORMATS["Q4_0"], (64, 64))
    blocks = dataclasses.replace(params, embed=embed)
    assert weight_form(blocks) == "packed Q4_0 blocks"
    panels = dataclasses.replace(
        params,
        embed=Packed(np.zeros(1, np.uint8), format="Q8_0", shape=(64, 64)),
        lm_head=Packed(np.zeros(1, np.uint8), format="BF16", shape=(64, 64)),
    )
    model = dataclasses.replace(llm.model, params=panels)
    assert repr(model).endswith(", float32, weights packed BF16, Q8_0 for native operations)")
    both = dataclasses.replace(panels, lm_head=embed)
    assert weight_form(both) == "packed Q8_0 for native operations and packed Q4_0 blocks"
