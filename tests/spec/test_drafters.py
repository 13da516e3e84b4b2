"""Drafters as objects: options, names, and what is refused."""

import re

import jax
import pytest

from infer.errors import ConfigError, RequestError
from infer.spec import Lookahead, NGram, Rule, SelfDraft, Suffix
from infer.spec.by_name import as_json, from_json, parse_drafter
from tests.typecheck import unchecked


def test_options_are_static() -> None:
    draft = Suffix(k=8, rule="coupled")
    assert jax.tree.leaves(draft) == []
    assert jax.tree.map(lambda x: x, draft) == draft and hash(draft) == hash(
        Suffix(k=8, rule="coupled")
    )
    assert draft.judged_by is Rule.COUPLED and draft.widths == (0, 8)
    assert "k=8" in str(draft) and "coupled" in str(draft)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (NGram, dict(k=0), "k is 0; it must be an integer from 1 to 64"),
        (NGram, dict(k=65), "k is 65; it must be"),
        (NGram, dict(k=True), "k is True; it must be"),
        (NGram, dict(k=2.0), "k is 2.0; it must be"),
        (NGram, dict(rule="exact"), "rule is 'exact'; there are 'token', 'block', 'coupled'"),
        (NGram, dict(adaptive=1), "adaptive is 1; it must be True or False"),
        (NGram, dict(k=4, tiers=(0, 2)), "tiers is (0, 2); it must be integers that begin with 0"),
        (NGram, dict(k=4, tiers=(1, 4)), "tiers is (1, 4); it must be"),
        (NGram, dict(k=4, tiers=4), "tiers is 4; it must be"),
        (NGram, dict(k=4, tiers=(0, 3, 3, 4)), "each must be larger than the one before"),
        (NGram, dict(k=4, costs=(1.0,)), "costs is (1.0,); it must be a number above 0"),
        (NGram, dict(k=4, costs=(1.0, 0)), "it must be a number above 0 for each of the tiers"),
        (NGram, dict(k=4, costs=(1.0, 1e-60)), "from 1e-30 to 1e30: they are float32"),
        (NGram, dict(k=4, costs=(1.0, float("nan"))), "it must be a number above 0"),
        (NGram, dict(max_match=10**6), "1 <= min_match <= max_match <= 256"),
        (NGram, dict(min_match=0), "1 <= min_match <= max_match"),
        (NGram, dict(min_match=3, max_match=2), "1 <= min_match <= max_match"),
        (NGram, dict(max_match="5"), "max_match is '5'; it must be an integer"),
        (NGram, dict(occurrence="last"), "occurrence is 'last'; it must be 'latest' or 'first'"),
        (Lookahead, dict(k=3, n=5), "n is 5; it must be an integer from 2 to 4"),
        (Lookahead, dict(pool=0), "pool is 0; it must be an integer from 1 to 4096"),
        (Suffix, dict(max_depth=0), "1 <= min_match <= max_depth"),
        (Suffix, dict(max_depth=257), "1 <= min_match <= max_depth <= 256"),
        (Suffix, dict(spec_factor=float("inf")), "it must be above 0 and finite"),
        (Suffix, dict(spec_factor=0), "spec_factor is 0; it must be above 0"),
        (Suffix, dict(spec_factor="1"), "spec_factor is '1'; it must be a number"),
        (Suffix, dict(min_token_prob=1.5), "it is a probability, 0 to 1"),
    ],
)
def test_options_out_of_range_are_named(kind: type, options: dict, message: str) -> None:
    with unchecked(), pytest.raises(ValueError, match=re.escape(message)):
        kind(**options)


def test_names_of_the_command_line() -> None:
    assert parse_drafter("ngram") == NGram()
    assert parse_drafter("suffix:8") == Suffix(k=8)
    assert parse_drafter("lookahead:1") == Lookahead(k=1, n=2)
    assert parse_drafter("lookahead:8") == Lookahead(k=8)
    assert parse_drafter("self:6:2") == SelfDraft(layers=6, k=2)
    for text, message in {
        "medusa": "no drafter 'medusa'; there are ngram, suffix, lookahead and self:LAYERS, each",
        "ngram:": "after a colon stands a number, as in ngram:8",
        "ngram:x": "after a colon stands a number",
        "ngram:4:4": "it must be ngram or ngram:K",
        "self": "it must be self:LAYERS or self:LAYERS:K",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(message)):
            parse_drafter(text)
    with pytest.raises(RequestError, match="k is 0"):
        parse_drafter("ngram:0")


@pytest.mark.parametrize(
    "drafter",
    [
        Lookahead(k=6, n=4),
        NGram(k=8, occurrence="first", tiers=(0, 2, 8)),
        Suffix(rule="token", costs=(1.0, 2.0)),
        SelfDraft(layers=3, rule="coupled"),
    ],
)
def test_a_drafter_comes_back_from_json(drafter) -> None:
    assert from_json(as_json(drafter)) == drafter
    with pytest.raises(ValueError, match="no drafter"):
        from_json('{"kind": "Other"}')
