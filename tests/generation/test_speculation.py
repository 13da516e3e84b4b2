"""Speculation in the loop of `generate`: greedy and coupled output is plain output, token for
token, whatever happens to slots, pages, stops and prompts beside it.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import infer
from infer import backend
from infer.cache import paged
from infer.cache.layout import pool_bytes
from infer.compiling import num_traces
from infer.errors import CapacityError, RequestError
from infer.generation.host import Job
from infer.generation.prepare import RunOptions
from infer.models.params import Params
from infer.pytree import pytree_dataclass, static
from infer.sampling import SamplingParams
from infer.spec import DraftModel, Lookahead, NGram, Suffix
from infer.spec.drafters import Drafter, Proposal
from tests.generation.test_generate import Letters
from tests.models import tiny
from tests.spec.table_model import Table
from tests.typecheck import unchecked

GREEDY = functools.partial(SamplingParams, temperature=0.0, ignore_eos=True)
DRAFTERS = {
    "ngram": NGram(k=4, min_match=1, adaptive=False),
    "suffix": Suffix(k=3, tiers=(0, 1, 3), costs=(1.0, 1.2, 1.5)),
    "lookahead": Lookahead(k=4, n=3, pool=16, adaptive=False),
}
RUN = dict(num_slots=3, page_size=4, num_pages=48, prefill_chunk=16)


def _prompts() -> list[list[int]]:
    """Return prompts of all lengths, some that repeat, two that begin alike."""
    rng = np.random.default_rng(0)
    ids = lambda n: rng.integers(0, tiny.NUM_TOKENS, n).tolist()
    head = ids(33)
    return [ids(5), head + ids(3), [1, 2, 3] * 5, ids(1), head + ids(2), ids(16), [7] * 9, head]


def _generate(params: Params, each: list[SamplingParams], **options):
    return infer.generate(params, _prompts(), sampling=each, **(RUN | options))


def _assert_equal(plain, drafted) -> None:
    """Assert equal tokens, ends and log-probabilities."""
    np.testing.assert_array_equal(drafted.lengths, plain.lengths)
    np.testing.assert_array_equal(drafted.tokens, plain.tokens)
    assert drafted.finish_reason == plain.finish_reason
    assert drafted.stop_reason == plain.stop_reason
    np.testing.assert_allclose(drafted.logprobs, plain.logprobs, atol=2e-5)
    np.testing.assert_array_equal(drafted.top_tokens, plain.top_tokens)
    np.testing.assert_allclose(drafted.top_logprobs, plain.top_logprobs, atol=2e-5)
    for got, want in zip(drafted.prompt_logprobs, plain.prompt_logprobs, strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            np.testing.assert_allclose(got, want, atol=2e-5)


# Each model, and each drafter: a drafter sees tokens, whatever made them.
@pytest.mark.parametrize(
    ("model", "drafter"), [("llama", "ngram"), ("gemma3", "suffix"), ("gemma3", "lookahead")]
)
def test_greedy_output_is_that_of_plain_decoding(model: str, drafter: str) -> None:
    params = {"llama": tiny.llama, "gemma3": tiny.gemma3}[model]()
    lengths = [3, 40, 50, 17, 1, 2, 60, 30]
    each = [
        GREEDY(max_tokens=n, logprobs=2, n=2 if i == 2 else 1, prompt_logprobs=i % 2 or None)
        for i, n in enumerate(lengths)
    ]
    plain = _generate(params, each)
    # Ends inside accepted blocks: ids that plain decoding gives somewhere, and lengths.
    stops = [
        sorted({int(plain.tokens[0, -1]), int(row[n // 2])})
        for row, n in zip(plain.tokens[[0, 1, 2, 4, 5, 6, 7, 8]], lengths, strict=True)
    ]
    ending = [
        dataclasses.replace(s, stop_token_ids=tuple(stop), min_tokens=min(i, s.max_tokens))
        for i, (s, stop) in enumerate(zip(each, stops, strict=True))
    ]
    for sampling in (each, ending):
        plain = _generate(params, sampling)
        drafted = _generate(params, sampling, draft=DRAFTERS[drafter])
        _assert_equal(plain, drafted)
        stats = drafted.stats
        assert stats["turns"] <= plain.stats["turns"]
        assert 0 < stats["accepted"] <= stats["drafted"]
        assert stats["tokens_per_pass"] > 1
    assert "stop" in drafted.finish_reason and "length" in drafted.finish_reason


def test_the_logits_of_a_round_must_fit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    params = tiny.llama()
    pool = pool_bytes(params.config, RUN["num_pages"], RUN["page_size"], params.dtype)
    monkeypatch.setattr(backend, "free_memory_bytes", lambda: pool + 100)
    prepare = lambda **draft: Job.prepare(
        params, [[1, 2]], None, None, GREEDY(max_tokens=2), None, RunOptions(**RUN, **draft)
    )
    prepare()
    with pytest.raises(CapacityError, match=r"the logits of 3 slots with 4 drafts .* draft fewer"):
        prepare(draft=NGram(k=4))


def test_the_pool_is_whole_again_and_tokens_per_pass_counts_what_came_out() -> None:
    each = [GREEDY(max_tokens=n) for n in (3, 40, 50, 17, 1, 2, 60, 30)]
    options = RunOptions(draft=DRAFTERS["ngram"], **RUN)
    job = Job.prepare(tiny.llama(), _prompts(), None, None, each, None, options)
    job.run_all()
    cache, s = job.state.cache, job.state.speculation
    paged.check_invariants(cache)
    assert int(cache.page_refs.sum()) == 0
    # Every token but each request's first comes out of a generating pass.
    assert int(s.tokens) == 203 - 8
    assert int(s.row_passes) < 203 - 8
    figures = job.stats()
    assert figures["acceptance_rate"] == figures["accepted"] / figures["drafted"]
    assert figures["passes_by_k"][4] > 0
    # A draft is judged only if those before it were: fewer at each position.
    assert sorted(s.drafted.tolist(), reverse=True) == s.drafted.tolist()


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_coupled_output_is_that_of_plain_seeded_sampling(drafter: str) -> None:
    kinds = [
        dict(temperature=0.3),
        dict(temperature=0.5, top_p=0.9),
        dict(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.2),
        dict(temperature=0.6, top_k=5, min_p=0.05, frequency_penalty=0.1),
        dict(temperature=0.0),
        dict(temperature=0.4, bad_words=[[3], [5, 6]], logit_bias={7: 3.0}),
        dict(temperature=0.4, n=2),
        dict(temperature=0.3, min_tokens=20, stop_token_ids=[7, 11, 23]),
    ]
    each = [
        SamplingParams(**kind, seed=i, max_tokens=40, logprobs=1, ignore_eos=True)
        for i, kind in enumerate(kinds)
    ]
    draft = dataclasses.replace(DRAFTERS[drafter], rule="coupled")
    plain = _generate(tiny.llama(), each)
    drafted = _generate(tiny.llama(), each, draft=draft)
    _assert_equal(plain, drafted)
    assert 0 < drafted.stats["accepted"] < drafted.stats["drafted"]
    if drafter == "ngram":  # after verification, which knows no drafter
        processed = [
            _generate(tiny.llama(), each, logprobs_mode="processed", draft=d) for d in (None, draft)
        ]
        _assert_equal(*processed)


@pytest.mark.parametrize("rule", ["block", "token"])
def test_greedy_rows_beside_drawn_ones_stay_what_they_are(rule: str) -> None:
    each = [
        GREEDY(max_tokens=40) if i % 2 else SamplingParams(temperature=0.8, seed=i, max_tokens=40)
        for i in range(8)
    ]
    plain = _generate(tiny.llama(), each)
    drafted = _generate(tiny.llama(), each, draft=NGram(k=4, min_match=1, rule=rule))
    for i in range(1, 8, 2):
        assert drafted.token_ids(i) == plain.token_ids(i)
    assert drafted.stats["accepted"] > 0


def test_a_second_call_compiles_nothing_and_costs_are_measured_on_the_way() -> None:
    draft = NGram(k=4, min_match=1, max_match=3)
    each = [GREEDY(max_tokens=60)] * 8
    first = _generate(tiny.llama(), each, num_slots=8, num_pages=None, draft=draft)
    before = num_traces("generate")
    again = _generate(tiny.llama(), each, num_slots=8, num_pages=None, draft=draft)
    other = [SamplingParams(temperature=0.5, seed=1, max_tokens=50)] * 8
    _generate(tiny.llama(), other, num_slots=8, num_pages=None, draft=draft)
    assert num_traces("generate") == before
    np.testing.assert_array_equal(first.tokens, again.tokens)
    costs = again.stats["turn_costs_by_k"]
    assert list(costs) == [0, 4] and all(0 < c < 10 for c in costs.values())


def test_a_drafter_with_weights_takes_others_without_compiling() -> None:
    run = lambda draft: infer.generate(
        _table_model(), [[1], [2]], sampling=GREEDY(max_tokens=12), draft=draft
    )
    good = Table(k=3, adaptive=False, table=jnp.asarray(_chain(1)))
    bad = Table(k=3, adaptive=False, table=jnp.asarray(_chain(2)))
    outs = [run(good)]
    before = num_traces("generate")
    outs.append(run(bad))
    assert num_traces("generate") == before
    np.testing.assert_array_equal(outs[0].tokens, outs[1].tokens)
    assert outs[0].stats["acceptance_rate"] != outs[1].stats["acceptance_rate"]


def _table_model() -> Params:
    from tests.spec.table_model import target

    return target()


def _chain(step: int) -> np.ndarray:
    """Return logits under which token t is followed by t + step."""
    return 9.0 * np.roll(np.eye(4, dtype=np.float32), step, axis=1)


def test_the_pure_form_is_the_hosts() -> None:
    prompts = np.asarray([[1, 2, 3, 1, 2, 3, 1, 2], [5, 6, 7, 8, 9, 10, 11, 12]], np.int32)
    draft = DRAFTERS["ngram"]

    @jax.jit
    def pure(params: Params, prompts: jax.Array):
        return infer.generate(params, prompts, sampling=GREEDY(max_tokens=30), draft=draft)

    host = infer.generate(tiny.llama(), prompts, sampling=GREEDY(max_tokens=30))
    out = pure(tiny.llama(), prompts)
    np.testing.assert_array_equal(out.tokens, host.tokens)
    assert int(out.state.speculation.accepted.sum()) > 0


def test_a_row_whose_logits_are_no_numbers_ends_where_plain_decoding_ends_it() -> None:
    params, prompt = tiny.llama(), list(range(60))
    sampling = SamplingParams(temperature=1.0, seed=4, max_tokens=30, ignore_eos=True)
    ids = infer.generate(params, [prompt], sampling=sampling).token_ids(0)
    # The model breaks after a token that comes late, and that no draft can hold before.
    poison = next(x for i, x in enumerate(ids) if i >= 8 and x >= 60 and x not in ids[:i])
    broken = dataclasses.replace(params, embed=params.embed.at[poison].set(jnp.nan))
    head = params.embed if params.lm_head is None else params.lm_head
    broken = dataclasses.replace(
        broken, lm_head=head, config=dataclasses.replace(params.config, tied_embeddings=False)
    )
    outs = [
        infer.generate(broken, [prompt], sampling=sampling, draft=draft)
        for draft in (None, NGram(k=4, min_match=1, adaptive=False, rule="coupled"))
    ]
    assert outs[0].finish_reason == outs[1].finish_reason == ["abort"]
    assert outs[0].token_ids(0) == outs[1].token_ids(0)
    assert outs[1].stats["drafted"] > 0


@pytest.mark.parametrize("through_a_file", [False, True])
def test_a_stream_goes_on_with_its_drafter(through_a_file: bool, tmp_path) -> None:
    run = functools.partial(infer.stream, tiny.llama(), tokenizer=Letters())
    asked = dict(sampling=GREEDY(max_tokens=60), draft=DRAFTERS["suffix"])
    prompt = [1, 2, 3] * 5
    plain = "".join(run(prompt, sampling=asked["sampling"]))
    first = run(prompt, **asked)
    said = [next(first), next(first)]
    state = first.state
    if through_a_file:
        infer.save_state(tmp_path / "state", state)
        state = infer.load_state(tmp_path / "state", tiny.llama())
    rest = run(state=state)
    assert "".join(said) + "".join(rest) == plain
    assert rest.stats["accepted"] > 0
    # The next message begins on what the state holds, with a drafter or without.
    longer = [*state.ids(), 5, 6]
    for draft in (None, DRAFTERS["suffix"]):
        on = run(longer, sampling=GREEDY(max_tokens=12), state=state, draft=draft)
        fresh = run(longer, sampling=GREEDY(max_tokens=12))
        assert "".join(on) == "".join(fresh)
        assert on.stats["shared_tokens"] > 0


def test_a_drafter_with_weights_is_kept_in_memory_and_refused_by_a_file(tmp_path) -> None:
    draft = Table(k=3, adaptive=False, table=jnp.asarray(_chain(1)))
    run = functools.partial(infer.stream, _table_model(), tokenizer=Letters())
    first = run([1], sampling=GREEDY(max_tokens=40), draft=draft)
    said = next(first)
    state = first.state
    with pytest.raises(RequestError, match="a file cannot hold the drafter Table"):
        infer.save_state(tmp_path / "state", state)
    assert said + "".join(run(state=state)) == "".join(run([1], sampling=GREEDY(max_tokens=40)))


def test_stop_strings_end_a_row_inside_a_block() -> None:
    run = functools.partial(infer.generate, tiny.llama(), [[1, 2, 3] * 5], tokenizer=Letters())
    text = run(sampling=GREEDY(max_tokens=60)).text[0]
    stop = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=60, stop=text[11:13])
    plain, drafted = run(sampling=stop), run(sampling=stop, draft=DRAFTERS["ngram"])
    assert plain.text == drafted.text and drafted.finish_reason == ["stop"]
    assert plain.token_ids(0) == drafted.token_ids(0)


@pytest.mark.parametrize(
    ("draft", "options", "message"),
    [
        ("ngram", {}, "draft is 'ngram'; pass a drafter, such as infer.spec.NGram(k=4), or None"),
        (NGram, {}, "pass a drafter, such as infer.spec.NGram(k=4)"),
        (
            NGram(k=63),
            dict(page_size=4, num_pages=16),
            "draft.k is 63, and the pool has 16 pages of 4 tokens",
        ),
    ],
)
def test_what_cannot_draft_is_refused_by_name(draft, options, message: str) -> None:
    with unchecked(), pytest.raises(RequestError, match=re.escape(message)):
        infer.generate(
            tiny.llama(), [[1, 2]], sampling=GREEDY(max_tokens=4), draft=draft, **options
        )


def test_more_drafts_than_a_short_request_has_tokens() -> None:
    # Those that fit are drafted: what the pool holds depends on the company.
    draft = NGram(k=40, min_match=1, adaptive=False)
    run = functools.partial(infer.generate, tiny.llama(), [[7] * 9], sampling=GREEDY(max_tokens=9))
    plain, drafted = run(), run(draft=draft)
    assert drafted.token_ids(0) == plain.token_ids(0)
    assert 0 < drafted.stats["drafted"] <= 7 * 8


def test_a_context_shorter_than_a_round_is_refused() -> None:
    config = tiny.llama_config(max_context=16)
    params = dataclasses.replace(tiny.llama(), config=config)
    with pytest.raises(RequestError, match=r"draft\.k is 15, and the model's context is 16"):
        infer.generate(params, [[1, 2]], sampling=GREEDY(max_tokens=4), draft=NGram(k=15))


@pytree_dataclass
class Proposing(Drafter):
    """Proposes nothing, in arrays of some shape, and counts the passes that it is shown."""

    tokens_width: int = static(default=3, kw_only=True)
    probs_width: int | None = static(default=None, kw_only=True)
    dtype: str = static(default="int32", kw_only=True)

    def create(self, target: Params, num_slots: int) -> jax.Array:
        return jnp.zeros(num_slots, jnp.int32)

    def prefill(self, target, cache, carry, tile, implementation):
        return cache, carry + 1

    def propose(self, target, cache, carry, asked, implementation):
        rows = asked.most.shape[0]
        tokens = jnp.zeros((rows, self.tokens_width), self.dtype)
        probs = None if self.probs_width is None else jnp.ones((rows, self.k, self.probs_width))
        return Proposal(tokens=tokens, probs=probs, count=asked.most * 0), cache, carry


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            dict(tokens_width=1),
            "Proposing proposed tokens int32[1, 1]; for 1 rows, k = 3 and 96 tokens it must be "
            "integers [1, 3]",
        ),
        (dict(dtype="float32"), "tokens float32[1, 3]; for"),
        (dict(probs_width=7), "probs float32[1, 3, 7]; for 1 rows, k = 3 and 96 tokens it must"),
    ],
)
def test_a_proposal_of_another_shape_is_refused_by_name(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        infer.generate(
            tiny.llama(), [[1, 2]], sampling=GREEDY(max_tokens=4), draft=Proposing(k=3, **options)
        )


def test_a_drafter_is_shown_passes_that_hold_prompt_tokens_and_no_others() -> None:
    options = RunOptions(draft=Proposing(k=3, adaptive=False), num_slots=2)
    prompts = [[1, 2, 3], [4], [5, 6]]
    each = [GREEDY(max_tokens=20), GREEDY(max_tokens=7), GREEDY(max_tokens=7)]
    job = Job.prepare(tiny.llama(), prompts, None, None, each, None, options)
    job.run_all()
    # Two prompts in prefill passes of their own turns, and a lone token in a decode pass.
    assert job.stats()["prefill_passes"] == 2 and job.stats()["decode_passes"] > 15
    assert job.state.speculation.drafter.tolist() == [3, 3]


def test_a_streams_first_piece_comes_before_turns_are_timed() -> None:
    # A program of its own: its costs are not known yet.
    draft = NGram(k=5, min_match=1, max_match=3)
    stream = infer.stream(
        tiny.llama(), [1, 2, 3], tokenizer=Letters(), sampling=GREEDY(max_tokens=99), draft=draft
    )
    next(stream)
    assert int(stream.state.state.counters.turns) == 1
    assert len("".join(stream)) > 90


def test_a_state_without_a_drafters_keys_is_no_beginning_for_one() -> None:
    run = functools.partial(infer.stream, tiny.llama(), tokenizer=Letters())
    first = run([1, 2, 3], sampling=GREEDY(max_tokens=20))
    next(first)
    longer, draft = [*first.state.ids(), 5], DraftModel(tiny.llama(), k=2)
    with pytest.raises(RequestError, match=r"the drafter is DraftModel\(.* and the state's None;"):
        run(longer, sampling=GREEDY(max_tokens=20), state=first.state, draft=draft)


def test_a_drafter_without_propose_says_so() -> None:
    with pytest.raises(NotImplementedError, match="Drafter has no propose"):
        infer.generate(tiny.llama(), [[1, 2]], sampling=GREEDY(max_tokens=4), draft=Drafter())
