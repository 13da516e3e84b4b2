"""Drafters: what `generate(..., draft=)` takes, and what its loop asks of one.

A drafter is a frozen pytree: its options are static, part of the program, and its weights, if any,
are leaves that travel beside the model's.  What it remembers between rounds is a carry of its own
in the loop's state, a pytree with a row a slot; keys and values of a drafter that is a model lie in
the target's pages, in layers of their own behind the target's (`cached`), so that a page that is
shared, copied or given back takes the drafter's part with it.

A drafter may propose fewer drafts than it is asked for, and none.  How many it proposes may depend
on the tokens before the round and on the drafts that it counts, never on one that it leaves out
(see `verify`).
"""

import dataclasses
import enum
import itertools
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Int

from infer.cache.paged import PagedCache
from infer.config import ModelConfig
from infer.errors import RequestError
from infer.models.params import Params
from infer.pytree import Leaf, pytree_dataclass, static
from infer.sampling import History, SamplingState
from infer.spec.context import Drafts, context_of
from infer.spec.ngram import Occurrence, check_matches, ngram_drafts
from infer.spec.rounds import Round
from infer.spec.suffix import check_options, suffix_drafts
from infer.spec.verify import Rule

MOST_DRAFTS = 64  # a round; the program has the layers once for each number of drafts it can verify


@pytree_dataclass
class Tile:
    """Tokens that go through the target's layers in one pass, as `through_layers` takes them: G
    rows of T tokens each.
    """

    tokens: Leaf  # int32 [G T]
    positions: Leaf  # int32 [G, T], of each token in its sequence; -1 = padding
    slots: Leaf  # int32 [G T], row of the page table; past its end = padding
    page_table: Leaf  # int32 [G, M]
    spans: Leaf  # int32 [G T], planned length of each token's sequence


@pytree_dataclass
class Asked:
    """B sequences that want drafts.  The last token of each is not in the cache yet."""

    history: History  # [B]
    sampling: SamplingState  # [B]
    choice: Leaf  # int32 [B], which of its prompt's parallel samples a row is
    last_token: Leaf  # int32 [B]
    cached: Leaf  # int32 [B], tokens in the target's cache; also the last token's position
    page_table: Leaf  # int32 [B, M]
    spans: Leaf  # int32 [B], planned length of each sequence
    most: Leaf  # int32 [B], drafts that are wanted at most; 0 for a row that wants none
    limit: Leaf  # int32 [], no row's `most` is above it: the draft steps that are worth their time

    @property
    def round(self) -> Round:
        """Where the round begins, for the drafter's random numbers."""
        return Round(key=self.sampling.key, choice=self.choice, position=self.history.num_generated)


@pytree_dataclass
class Proposal:
    """Drafts for B sequences."""

    tokens: Leaf  # int32 [B, k]
    probs: Leaf  # f32 [B, k, V] they were drawn from; None: functions of the tokens before
    count: Leaf  # int32 [B], 0 to k; what is above `Asked.most` is cut off


@pytree_dataclass
class Seen:
    """What a pass of the target over B slots has shown: a decode pass (T = 1) or a round (T = k +
    1).
    """

    rows: Leaf  # bool [B], slots that took part
    x: Leaf  # [B, T, D], residual streams of the last token and of the drafts
    logits: Leaf  # f32 [B, T, V], the model's own; None after a decode pass
    tokens: Leaf  # int32 [B, T], that were fed: the last token and the drafts
    fed: Leaf  # int32 [B], how many of them there are; 0 where the slot took no part
    emitted: Leaf  # int32 [B, T], that came out, V past the end; None after a decode pass
    count: Leaf  # int32 [B], of the fed tokens that are part of the sequence now: 1 to T, or 0


@pytree_dataclass
class Drafter:
    """Options that all drafters have, and the hooks that the loop calls; a drafter without a carry,
    a cache or eyes has `propose` alone.

    Attributes:
        k: drafts a round at most, 1 to 64.
        rule: "block" (the default), "token" or "coupled"; see `Rule`.
        adaptive: choose the number of drafts by what rounds have cost and brought; False drafts k
            in every round.
        tiers: numbers of drafts that rounds are compiled for, ascending, 0 first and k last; None
            is (0, k).  A round runs in the smallest tier that holds its drafts.
        costs: of a turn in each tier, in any unit, for the choice of k; None measures them, or,
            inside a trace, guesses.
    """

    k: int = static(default=4, kw_only=True)
    rule: Rule | str = static(default=Rule.BLOCK, kw_only=True)
    adaptive: bool = static(default=True, kw_only=True)
    tiers: tuple[int, ...] | None = static(default=None, kw_only=True)
    costs: tuple[float, ...] | None = static(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_k(self.k)
        object.__setattr__(self, "rule", _rule(self.rule))
        object.__setattr__(self, "tiers", _tiers(self.tiers, self.k))
        if not isinstance(self.adaptive, bool):
            raise RequestError(f"adaptive is {self.adaptive!r}; it must be True or False")
        object.__setattr__(self, "costs", _costs(self.costs, self.widths))

    def __str__(self) -> str:
        options = [f for f in dataclasses.fields(self) if f.metadata.get("static")]
        shown = {f.name: getattr(self, f.name) for f in options}
        words = {n: v.value if isinstance(v, enum.Enum) else v for n, v in shown.items()}
        return f"{type(self).__name__}({', '.join(f'{n}={v!r}' for n, v in words.items())})"

    @property
    def widths(self) -> tuple[int, ...]:
        """The tiers: 0, ..., k."""
        assert self.tiers is not None
        return self.tiers

    @property
    def judged_by(self) -> Rule:
        """The rule."""
        assert isinstance(self.rule, Rule)
        return self.rule

    def check(self, target: ModelConfig) -> None:
        """Raise RequestError if this drafter cannot draft for the target."""

    def cached(self, target: ModelConfig) -> tuple[ModelConfig, ...]:
        """Return the models whose keys and values are cached behind the target's own."""
        return ()

    def create(self, target: Params, num_slots: int) -> Any:
        """Return the carry before the first request: a pytree, B rows in every leaf."""
        return ()

    def reset(self, carry: Any, slots: Array) -> Any:
        """Return the carry with the slots [B] that are marked as they are before their first token.
        What a new request shares with another's prompt counts as prefilled.
        """
        return carry

    def prefill(
        self,
        target: Params,
        cache: PagedCache,
        carry: Any,
        tile: Tile,
        implementation: str | None,
    ) -> tuple[PagedCache, Any]:
        """Return cache and carry after prompt tokens that have just gone through the target's
        layers: those of a prefill pass, and the lone last tokens that a decode pass takes.  Every
        prompt token comes once, but those that were shared.
        """
        return cache, carry

    def propose(
        self,
        target: Params,
        cache: PagedCache,
        carry: Any,
        asked: Asked,
        implementation: str | None,
    ) -> tuple[Proposal, PagedCache, Any]:
        """Return drafts for B sequences.  What it writes into the cache past the sequences' lengths
        is overwritten or never read.
        """
        raise NotImplementedError(f"{type(self).__name__} has no propose")

    def observe(self, target: Params, carry: Any, seen: Seen, implementation: str | None) -> Any:
        """Return the carry after a pass of the target."""
        return carry


@pytree_dataclass
class NGram(Drafter):
    """Prompt lookup: what followed the last tokens when they stood there before; see
    `infer.spec.ngram`.

    Attributes:
        min_match: tokens that must match; at least 1.
        max_match: tokens that are compared at most.
        occurrence: which of several equally long matches is taken, "latest" or "first".
    """

    min_match: int = static(default=2, kw_only=True)
    max_match: int = static(default=5, kw_only=True)
    occurrence: Occurrence | str = static(default=Occurrence.LATEST, kw_only=True)

    def __post_init__(self) -> None:
        Drafter.__post_init__(self)
        try:
            object.__setattr__(self, "occurrence", Occurrence(self.occurrence))
        except ValueError:
            raise RequestError(
                f"occurrence is {self.occurrence!r}; it must be 'latest' or 'first'"
            ) from None
        _check_ints(min_match=self.min_match, max_match=self.max_match)
        check_matches(self.min_match, self.max_match)

    def propose(
        self,
        target: Params,
        cache: PagedCache,
        carry: Any,
        asked: Asked,
        implementation: str | None,
    ) -> tuple[Proposal, PagedCache, Any]:
        """Return what the sequences' own text suggests."""
        assert isinstance(self.occurrence, Occurrence)
        drafts = ngram_drafts(
            context_of(asked.history),
            k=self.k,
            min_match=self.min_match,
            max_match=self.max_match,
            occurrence=self.occurrence,
        )
        return _proposed(drafts), cache, carry


@pytree_dataclass
class Suffix(Drafter):
    """Suffix decoding: the likeliest continuation, by count, of the longest suffix seen before; see
    `infer.spec.suffix`.

    Attributes:
        max_depth: tokens of the suffix that are compared at most.
        min_match: tokens that must match; at least 1.
        spec_factor: drafts a matched token; above 0.
        min_token_prob: least estimated probability that all drafts up to one stand; 0 to 1.
    """

    max_depth: int = static(default=24, kw_only=True)
    min_match: int = static(default=1, kw_only=True)
    spec_factor: float = static(default=1.0, kw_only=True)
    min_token_prob: float = static(default=0.1, kw_only=True)

    def __post_init__(self) -> None:
        Drafter.__post_init__(self)
        _check_ints(min_match=self.min_match, max_depth=self.max_depth)
        for name in ("spec_factor", "min_token_prob"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise RequestError(f"{name} is {value!r}; it must be a number")
        check_options(self.max_depth, self.min_match, self.spec_factor, self.min_token_prob)

    def propose(
        self,
        target: Params,
        cache: PagedCache,
        carry: Any,
        asked: Asked,
        implementation: str | None,
    ) -> tuple[Proposal, PagedCache, Any]:
        """Return what the sequences' own text suggests."""
        drafts = suffix_drafts(
            context_of(asked.history),
            k=self.k,
            max_depth=self.max_depth,
            min_match=self.min_match,
            spec_factor=self.spec_factor,
            min_token_prob=self.min_token_prob,
        )
        return _proposed(drafts), cache, carry


def clipped(
    drafter: Drafter, proposal: Proposal, most: Int[Array, " B"], vocab_size: int
) -> Proposal:
    """Return the drafter's proposal with at most so many drafts a row.

    Raises:
        ValueError: its arrays are no proposal of k drafts a row.
    """
    _check_proposal(drafter, proposal, most.shape[0], vocab_size)
    count = jnp.clip(proposal.count, 0, jnp.minimum(most, drafter.k))
    return Proposal(
        tokens=proposal.tokens.astype(jnp.int32),
        probs=proposal.probs,
        count=count.astype(jnp.int32),
    )


def _check_proposal(drafter: Drafter, proposal: Any, num_rows: int, vocab_size: int) -> None:
    name, k = type(drafter).__name__, drafter.k
    if not isinstance(proposal, Proposal):
        raise ValueError(
            f"{name}.propose returned a {type(proposal).__name__} first; it must return a "
            "Proposal, the cache and the carry"
        )
    wanted = {"tokens": ((num_rows, k), jnp.integer), "count": ((num_rows,), jnp.integer)}
    if proposal.probs is not None:
        wanted["probs"] = ((num_rows, k, vocab_size), jnp.floating)
    for field, (shape, kind) in wanted.items():
        value = getattr(proposal, field)
        if value.shape != shape or not jnp.issubdtype(value.dtype, kind):
            raise ValueError(
                f"{name} proposed {field} {value.dtype}{list(value.shape)}; for {num_rows} rows, "
                f"k = {k} and {vocab_size} tokens it must be "
                f"{'floats' if kind is jnp.floating else 'integers'} {list(shape)}"
            )


def _proposed(drafts: Drafts) -> Proposal:
    return Proposal(tokens=drafts.tokens, probs=None, count=drafts.count)


def check_k(k: Any) -> None:
    """Raise RequestError unless k is a number of drafts that a round can have."""
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= MOST_DRAFTS:
        raise RequestError(
            f"k is {k!r}; it must be an integer from 1 to {MOST_DRAFTS}: drafts a round"
        )


def _rule(rule: Any) -> Rule:
    try:
        return Rule(rule)
    except ValueError:
        raise RequestError(
            f"rule is {rule!r}; there are {', '.join(repr(r.value) for r in Rule)}"
        ) from None


def _tiers(tiers: Any, k: int) -> tuple[int, ...]:
    if tiers is None:
        return (0, k)
    found = tuple(tiers) if isinstance(tiers, (tuple, list)) else ()
    whole = all(isinstance(t, int) and not isinstance(t, bool) for t in found)
    if not whole or len(found) < 2 or found[0] != 0 or found[-1] != k:
        raise RequestError(
            f"tiers is {tiers!r}; it must be integers that begin with 0 and end with k, {k}: "
            f"(0, {k}) is the default"
        )
    if any(a >= b for a, b in itertools.pairwise(found)):
        raise RequestError(f"tiers is {tiers!r}; each must be larger than the one before")
    return found


def _costs(costs: Any, tiers: tuple[int, ...]) -> tuple[float, ...] | None:
    if costs is None:
        return None
    found = tuple(costs) if isinstance(costs, (tuple, list)) else ()
    numbers = all(isinstance(c, (int, float)) and not isinstance(c, bool) for c in found)
    if not numbers or len(found) != len(tiers) or not all(_is_cost(c) for c in found):
        raise RequestError(
            f"costs is {costs!r}; it must be a number above 0 for each of the tiers {tiers}, from "
            "1e-30 to 1e30: they are float32"
        )
    return tuple(map(float, found))


def _is_cost(value: float) -> bool:
    # Far inside float32, with room for what is computed from them.
    return 1e-30 <= value <= 1e30


def _check_ints(**values: Any) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise RequestError(f"{name} is {value!r}; it must be an integer")
