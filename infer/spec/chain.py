"""Drafts drawn one after the other from a model's own steps."""

import dataclasses
import functools
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from infer.cache.paged import PagedCache
from infer.models import decoder
from infer.models.paged_forward import through_layers
from infer.models.params import Params
from infer.ops.sample import process_logits
from infer.pytree import Leaf, pytree_dataclass
from infer.sampling import History, Role
from infer.spec import vocabulary as vocabularies
from infer.spec.drafters import Asked, Proposal
from infer.spec.draws import Drawn, draw
from infer.spec.rounds import plain_keys, round_keys
from infer.spec.verify import Rule
from infer.spec.vocabulary import VocabularyMap


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Passes of a drafter over the rows of a round."""

    params: Params  # the drafter's
    first_layer: int  # of its pools in the cache
    asked: Asked
    implementation: str | None

    def run(
        self, cache: PagedCache, tokens: Int[Array, "B T"], positions: Int[Array, "B T"]
    ) -> tuple[Float[Array, "N D"], PagedCache]:
        """Run tokens in the drafter's own ids; position -1 is padding."""
        asked = self.asked
        num_rows, width = tokens.shape
        slots = jnp.arange(num_rows, dtype=jnp.int32)
        none = cache.page_table.shape[0]
        return through_layers(
            self.params,
            cache,
            tokens.reshape(-1),
            positions,
            jnp.where(positions < 0, none, slots[:, None]).reshape(-1),
            asked.page_table,
            jnp.repeat(asked.spans, width),
            self.implementation,
            first_layer=self.first_layer,
        )


@pytree_dataclass
class _Chain:
    """How far the drafts of B rows have come."""

    index: Leaf  # int32 [], of the draft to be drawn
    last: Leaf  # int32 [B], the draft before it
    tokens: Leaf  # int32 [B, k]
    probs: Leaf  # f32 [B, k, V], None for the coupled rule
    count: Leaf  # int32 [B]; a row's drafts end with the first that cannot be drawn
    history: History  # with the drafts


def draw_chain(
    steps: Steps,
    cache: PagedCache,
    x: Float[Array, "B D"],
    *,
    k: int,
    rule: Rule,
    vocabulary: VocabularyMap | None,
    vocab_size: int,
) -> tuple[Proposal, PagedCache]:
    """Draw up to `asked.most` drafts a row: the first from `x`, each later one after a step.

    Args:
        steps: passes of the drafter.
        cache: with the last tokens read.
        x: residual streams of the last tokens.
        k: drafts at most.
        rule: how they will be judged.
        vocabulary: from the drafter's ids to the target's; None: the same.
        vocab_size: V, of the target.
    """
    asked = steps.asked
    coupled = rule is Rule.COUPLED
    keys = _keys(asked, k, coupled)
    process = functools.partial(process_logits, implementation=steps.implementation)

    def extended(chain: _Chain, x: Array) -> _Chain:
        raw = decoder.logits(steps.params, x, steps.implementation)
        raw = _over_target(raw, vocabulary, vocab_size)
        drawn = draw(
            raw, asked.sampling, chain.history, keys[:, chain.index], process_logits=process
        )
        return _with_draft(chain, drawn, asked.most)

    def step(c: tuple[_Chain, PagedCache]) -> tuple[_Chain, PagedCache]:
        chain, cache = c
        goes_on = (chain.count == chain.index) & (chain.index < asked.most)
        positions = jnp.where(goes_on, asked.cached + chain.index, -1)
        fed = chain.last
        if vocabulary is not None:
            fed = vocabularies.tokens_on_draft(vocabulary, fed)
        x, cache = steps.run(cache, fed[:, None], positions[:, None])
        return extended(chain, x), cache

    num_rows = x.shape[0]
    probs = None if coupled else jnp.zeros((num_rows, k, vocab_size), jnp.float32)
    chain = _Chain(
        index=jnp.zeros((), jnp.int32),
        last=asked.last_token,
        tokens=jnp.zeros((num_rows, k), jnp.int32),
        probs=probs,
        count=jnp.zeros_like(asked.most),
        history=asked.history,
    )
    limit = jnp.max(asked.most)
    chain, cache = lax.while_loop(lambda c: c[0].index < limit, step, (extended(chain, x), cache))
    return Proposal(tokens=chain.tokens, probs=chain.probs, count=chain.count), cache


def _keys(asked: Asked, k: int, coupled: bool) -> Array:
    """Return typed keys [B, k]: the drafts' own, or those of the plain draws."""
    if not coupled:
        return round_keys(asked.round, k, Role.DRAFT)
    offset = jnp.arange(k, dtype=jnp.int32)[None, :]
    return plain_keys(asked.round, jnp.broadcast_to(offset, (asked.most.shape[0], k)))


def _with_draft(chain: _Chain, drawn: Drawn, most: Int[Array, " B"]) -> _Chain:
    history, index = chain.history, chain.index
    takes = (chain.count == index) & (index < most) & drawn.there
    rows = jnp.arange(takes.shape[0], dtype=jnp.int32)
    at = jnp.where(takes, history.num_generated, history.generated.shape[1])
    one_more = takes.astype(jnp.int32)
    return _Chain(
        index=index + 1,
        last=drawn.tokens,
        tokens=chain.tokens.at[:, index].set(drawn.tokens),
        probs=None if chain.probs is None else chain.probs.at[:, index].set(drawn.probs),
        count=chain.count + one_more,
        history=dataclasses.replace(
            history,
            generated=history.generated.at[rows, at].set(drawn.tokens, mode="drop"),
            num_generated=history.num_generated + one_more,
        ),
    )


def _over_target(
    raw: Float[Array, "B X"], vocabulary: VocabularyMap | None, vocab_size: int
) -> Float[Array, "B V"]:
    """Return the drafter's logits over the target's ids."""
    if vocabulary is not None:
        return vocabularies.logits_on_target(vocabulary, raw)
    missing = vocab_size - raw.shape[1]
    # Rows of padding in one of the embeddings: ids that neither tokenizer has.
    if missing > 0:
        return jnp.pad(raw, ((0, 0), (0, missing)), constant_values=-jnp.inf)
    return raw[:, :vocab_size]
