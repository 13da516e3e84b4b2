"""Beam search against transformers, and its pages against the accounts of the pool."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import infer
from infer.cache import paged
from infer.errors import RequestError
from tests.models import tiny
from tests.models.test_families import from_hf

GOLDEN = Path(__file__).parent.parent / "data" / "beams.json"


@functools.cache
def _golden() -> dict:
    return json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("num_beams", [2, 5])
@pytest.mark.parametrize("num_stops", [0, 1, 3])
def test_sequences_and_scores_equal_those_of_transformers(num_beams: int, num_stops: int) -> None:
    golden, compared = _golden(), 0
    for case in golden["cases"]:
        if case["num_beams"] != num_beams or len(case["stop_token_ids"]) != num_stops:
            continue
        found = infer.beam_search(
            from_hf("llama"),
            [case["prompt"]],
            num_beams=num_beams,
            num_return_sequences=num_beams,
            max_tokens=golden["max_new"],
            length_penalty=case["length_penalty"],
            early_stopping=case["early_stopping"],
            stop_token_ids=case["stop_token_ids"],
            ignore_eos=True,
            page_size=4,
        )
        unpadded = [[i for i in ids if i != golden["pad"]] for ids in case["sequences"]]
        # A place in the list that transformers could not fill has a score of -1e9.
        real = [k for k, score in enumerate(case["scores"]) if score > -1e8]
        assert found.token_ids[0] == [unpadded[k] for k in real], case
        np.testing.assert_allclose(
            found.scores[0], [case["scores"][k] for k in real], rtol=1e-4, atol=1e-4
        )
        compared += 1
    assert compared == 24


def test_a_prompt_is_searched_alike_alone_and_in_a_batch_and_beams_share_pages() -> None:
    prompts = [case["prompt"] for case in _golden()["cases"]]
    prompts = [list(ids) for ids in dict.fromkeys(map(tuple, prompts))]
    run = functools.partial(
        infer.beam_search,
        from_hf("llama"),
        num_beams=4,
        num_return_sequences=3,
        max_tokens=15,
        stop_token_ids=[88],
        page_size=4,
    )
    together = run(prompts)
    for g, prompt in enumerate(prompts):
        alone = run([prompt])
        assert alone.token_ids[0] == together.token_ids[g]
        np.testing.assert_allclose(alone.scores[0], together.scores[g], rtol=1e-5)
        assert 0 < alone.stats["pages_copied"]
        separate = 4 * -(-(len(prompt) + 15) // 4)
        assert alone.stats["most_pages"] < separate


def test_one_beam_is_greedy_and_text_is_without_the_stop() -> None:
    class Letters:
        eos_ids, pad_id = (5,), None

        def encode(self, text, *, add_bos=None, parse_special=False):
            return [ord(c) - 60 for c in text]

        def stream(self, *, skip_special_tokens=True, continuation=False):
            class Stream:
                put = staticmethod(lambda i: chr(60 + i))
                flush = staticmethod(lambda: "")

            return Stream()

    greedy = infer.generate(
        tiny.llama(), [[1, 2, 3]], sampling=infer.SamplingParams(temperature=0, max_tokens=12)
    )
    found = infer.beam_search(tiny.llama(), [[1, 2, 3]], num_beams=1, max_tokens=12)
    assert found.token_ids[0][0] == greedy.token_ids(0)
    last = greedy.token_ids(0)[-1]
    stop = greedy.token_ids(0).index(last)
    found = infer.beam_search(
        tiny.llama(),
        "=>?",
        tokenizer=Letters(),
        num_beams=1,
        max_tokens=12,
        stop_token_ids=[last],
    )
    ids = found.token_ids[0][0]
    assert ids == greedy.token_ids(0)[: stop + 1]
    assert found.text == [["".join(chr(60 + i) for i in ids[:-1])]]


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(num_beams=0), "num_beams is 0, must be an integer from 1 to 256"),
        (dict(num_return_sequences=5), "num_return_sequences is 5, must be from 1 to num_beams, 4"),
        (dict(length_penalty=float("nan")), "length_penalty is nan, must be a number from -5 to 5"),
        (dict(length_penalty=10**400), "length_penalty is 1000"),
        (dict(early_stopping="maybe"), "early_stopping is 'maybe', must be True, False or 'never'"),
        (dict(stop_token_ids=[90]), "stop_token_ids has 90"),
        (dict(max_tokens=0), "max_tokens"),
    ],
)
def test_what_cannot_be_searched_is_refused(options: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        infer.beam_search(tiny.llama(), [[1, 2]], **options)


def test_a_model_that_gives_no_numbers_is_an_error_not_an_empty_answer() -> None:
    nan = jax.tree.map(
        lambda x: jnp.full_like(x, jnp.nan) if x.dtype == jnp.float32 else x, tiny.llama()
    )
    with pytest.raises(RequestError, match="prompt 0: no sequence has a score that is a number"):
        infer.beam_search(nan, [[1, 2, 3]], num_beams=3, max_tokens=4, stop_token_ids=(0,))


_reorder, _own = jax.jit(paged.reorder), jax.jit(paged.own_next_page)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 3), min_size=4, max_size=4),
            st.lists(st.booleans(), min_size=4, max_size=4),
        ),
        max_size=14,
    )
)
def test_rows_that_fork_and_write_never_see_each_other(steps) -> None:
    """Against rows as plain lists: each step every row goes on as another, and some write."""
    cache = paged.create(
        tiny.llama_config(), num_rows=4, num_pages=24, page_size=3, pages_per_row=6, dtype="float32"
    )
    model: list[list[float]] = [[] for _ in range(4)]
    value = 0.0
    for source, writes in steps:
        cache = _reorder(cache, jnp.asarray(source, jnp.int32))
        model = [list(model[s]) for s in source]
        rows = jnp.asarray(writes)
        cache, _ = _own(cache, rows)
        pages = paged.page_of(
            cache.page_table, jnp.arange(4), jnp.where(rows, cache.lengths, -1), 24, 3
        )
        values = value + jnp.arange(4.0)
        written = paged.write_tokens(
            cache.k_pages[0],
            jnp.broadcast_to(values[:, None, None], (4, 2, 8)),
            pages,
            cache.lengths,
        )
        lengths = cache.lengths + rows.astype(jnp.int32)
        cache = cache.__class__(
            **{**vars(cache), "k_pages": (written, *cache.k_pages[1:]), "lengths": lengths}
        )
        for row in range(4):
            if writes[row]:
                model[row].append(value + row)
        value += 10.0
        paged.check_invariants(cache)
        assert not bool(cache.overflow)
        for row in range(4):
            got = [
                float(cache.k_pages[0][cache.page_table[row, i // 3], 0, i % 3, 0])
                for i in range(int(cache.lengths[row]))
            ]
            assert got == model[row]
