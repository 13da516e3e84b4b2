"""Drafters that are models: one of its own (`DraftModel`), and the target's first layers
(`SelfDraft`).

A draft is drawn as the target would draw it, from the drafter's logits: under the request's masks,
penalties, temperature and filters, with the drafts before it counted as emitted.  Its keys are the
round's own (`Role.DRAFT`), or, for the coupled rule, those of the plain draws.

A round is at least one pass over two tokens a row, which draws the first draft, and a single step
for each draft more; no step is run only to read the last draft.  The second of the two tokens is
the sequence's last.  The first is the one before it, where the drafter has not read it: the last
draft of a round in which all drafts stood.  After turns without drafts the same pass is repeated
until the drafter has read what came meanwhile.

Keys and values of a `DraftModel` are layers of the target's own cache: same pages, same page table,
same lengths.  What shares, forks, copies, refills or rolls back the target's sequences does so with
the drafter's.  `SelfDraft` reads and writes the target's layers themselves, whose pass over the
same tokens then writes them again.
"""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from infer.cache.paged import PagedCache
from infer.config import ModelConfig
from infer.errors import RequestError
from infer.models.paged_forward import through_layers
from infer.models.params import Params
from infer.pytree import Leaf, pytree_dataclass, static
from infer.spec import vocabulary as vocabularies
from infer.spec.chain import Steps, draw_chain
from infer.spec.drafters import Asked, Drafter, Proposal, Seen, Tile
from infer.spec.vocabulary import VocabularyMap
from infer.tokenizer import Tokenizer


@runtime_checkable
class LoadedModel(Protocol):
    """What `DraftModel.of` needs of a model: `infer.load` gives it."""

    @property
    def params(self) -> Params: ...  # noqa: D102
    @property
    def tokenizer(self) -> Tokenizer: ...  # noqa: D102


@pytree_dataclass
class Reading:
    """The carry of a `DraftModel`: how far its keys and values reach in each of B sequences."""

    behind: Leaf  # int32 [B], tokens before the last one that it has not read
    ahead: Leaf  # int32 [B], that it has read in this turn: the last token, and drafts


@pytree_dataclass
class DraftModel(Drafter):
    """A model of its own, such as a smaller one of the same family, or a coarser copy of the
    target.

    Sequences that reach past its context are continued without drafts.

    Attributes:
        params: its weights, on the device of the target's.
        vocabulary: which of its tokens are which of the target's; None: all are the same.
    """

    params: Params
    vocabulary: VocabularyMap | None = dataclasses.field(default=None, kw_only=True)

    @classmethod
    def of(cls, model: LoadedModel, target: LoadedModel, **options: Any) -> "DraftModel":
        """Return the drafter that `model` is for `target`, with a map where their tokens differ.

        Args:
            model: the drafter, with its tokenizer.
            target: the model it drafts for.
            **options: k, rule and the others of a `Drafter`.

        Raises:
            ConfigError: the two have no token in common.
            RequestError: one of them is no loaded model.
        """
        for name, given in (("model", model), ("target", target)):
            if not isinstance(given, LoadedModel):
                raise RequestError(
                    f"{name} is a {type(given).__name__}; pass what infer.load gives, weights and "
                    "tokenizer; weights alone, of the same vocabulary, go with "
                    "infer.spec.DraftModel(params)"
                )
        mapping = None
        if not vocabularies.same_tokens(model.tokenizer, target.tokenizer):
            mapping = vocabularies.of_tokenizers(
                model.tokenizer,
                target.tokenizer,
                draft_width=model.params.config.vocab_size,
                target_width=target.params.config.vocab_size,
            )
        return cls(model.params, vocabulary=mapping, **options)

    def check(self, target: ModelConfig) -> None:
        """Raise RequestError if it has no weights, or its ids are not the target's, or not those
        that the map is for.
        """
        if not isinstance(self.params, Params):
            raise RequestError(
                f"DraftModel's params are a {type(self.params).__name__}; pass a model's weights, "
                "model.params, or infer.spec.DraftModel.of(model, target)"
            )
        own = self.params.config
        if self.vocabulary is None:
            if own.num_tokens != target.num_tokens:
                raise RequestError(
                    f"the drafter ({own.family}) knows {own.num_tokens} tokens and the model "
                    f"({target.family}) {target.num_tokens}: they are other vocabularies; "
                    "infer.spec.DraftModel.of(model, target) maps one to the other"
                )
            return
        sizes = self.vocabulary.to_target.shape[0], self.vocabulary.to_draft.shape[0]
        if sizes != (own.vocab_size, target.vocab_size):
            raise RequestError(
                f"the drafter's vocabulary map is from {sizes[0]} ids to {sizes[1]}, its logits "
                f"are over {own.vocab_size} and the model's over {target.vocab_size}; make the map "
                "of these two models, by infer.spec.DraftModel.of(model, target)"
            )

    def cached(self, target: ModelConfig) -> tuple[ModelConfig, ...]:
        """Return the drafter."""
        return (self.params.config,)

    def create(self, target: Params, num_slots: int) -> Reading:
        """Return the carry of sequences that are read as far as the target's cache goes."""
        # Two arrays: a donated state must not hold one twice.
        return Reading(
            behind=jnp.zeros(num_slots, jnp.int32), ahead=jnp.zeros(num_slots, jnp.int32)
        )

    def reset(self, carry: Reading, slots: Array) -> Reading:
        """Return the carry with new sequences in the marked slots: of their prompts the drafter has
        read what the target has.
        """
        none = lambda leaf: jnp.where(slots, 0, leaf)
        return Reading(behind=none(carry.behind), ahead=none(carry.ahead))

    def prefill(
        self,
        target: Params,
        cache: PagedCache,
        carry: Reading,
        tile: Tile,
        implementation: str | None,
    ) -> tuple[PagedCache, Reading]:
        """Read prompt tokens."""
        _, cache = through_layers(
            self.params,
            cache,
            self._read(tile.tokens),
            tile.positions,
            tile.slots,
            tile.page_table,
            tile.spans,
            implementation,
            first_layer=target.config.num_layers,
        )
        return cache, carry

    def propose(
        self,
        target: Params,
        cache: PagedCache,
        carry: Reading,
        asked: Asked,
        implementation: str | None,
    ) -> tuple[Proposal, PagedCache, Reading]:
        """Read what is missing, then draw up to k drafts."""
        inside = asked.cached + asked.most <= self.params.config.max_context
        most = jnp.where(inside, asked.most, 0)
        steps = Steps(
            params=self.params,
            first_layer=target.config.num_layers,
            asked=dataclasses.replace(asked, most=most),
            implementation=implementation,
        )
        cache, x = self._caught_up(steps, cache, carry.behind)
        proposal, cache = draw_chain(
            steps,
            cache,
            x,
            k=self.k,
            rule=self.judged_by,
            vocabulary=self.vocabulary,
            vocab_size=target.config.vocab_size,
        )
        wanted = most > 0
        carry = Reading(behind=jnp.where(wanted, 0, carry.behind), ahead=most)
        return proposal, cache, carry

    def _caught_up(
        self, steps: Steps, cache: PagedCache, behind: Int[Array, " B"]
    ) -> tuple[PagedCache, Float[Array, "B D"]]:
        """Read the last token of each row, and those before it that are not read; return the last
        ones' residual streams.
        """
        asked = steps.asked
        end = asked.cached + 1
        row = jnp.arange(end.shape[0], dtype=jnp.int32)[:, None]
        history = asked.history
        offset = jnp.arange(2, dtype=jnp.int32)[None, :]

        def read(c: tuple[PagedCache, Array, Array]) -> tuple[PagedCache, Array, Array]:
            cache, begin, x = c
            positions = begin[:, None] + offset
            inside = positions < end[:, None]
            generated = positions - history.prompt_lens[:, None]
            prompt = history.prompts.at[row, positions].get(mode="clip")
            new = history.generated.at[row, jnp.maximum(generated, 0)].get(mode="clip")
            tokens = jnp.where(generated < 0, prompt, new)
            tokens = jnp.where(
                positions == asked.cached[:, None], asked.last_token[:, None], tokens
            )
            y, cache = steps.run(cache, self._read(tokens), jnp.where(inside, positions, -1))
            # A row's last token is in the column of its position.
            column = jnp.clip(end - 1 - begin, 0, 1)
            last = y.reshape(*positions.shape, -1)[row[:, 0], column]
            x = jnp.where((begin < end)[:, None], last, x)
            return cache, jnp.minimum(begin + 2, end), x

        begin = jnp.where(asked.most > 0, asked.cached - behind, end)
        x = jnp.zeros((end.shape[0], self.params.config.hidden_size), self.params.dtype)
        cache, _, x = lax.while_loop(lambda c: jnp.any(c[1] < end), read, (cache, begin, x))
        return cache, x

    def observe(
        self, target: Params, carry: Reading, seen: Seen, implementation: str | None
    ) -> Reading:
        """Return how far the drafter has read after the target has judged."""
        unread = carry.behind + jnp.maximum(seen.count - carry.ahead, 0)
        behind = jnp.where(seen.rows, unread, carry.behind)
        return Reading(behind=behind, ahead=jnp.where(seen.rows, 0, carry.ahead))

    def _read(self, tokens: Array) -> Array:
        if self.vocabulary is None:
            return tokens
        return vocabularies.tokens_on_draft(self.vocabulary, tokens)


@pytree_dataclass
class SelfDraft(Drafter):
    """Early exit: the target's first layers, then its final norm and head.

    Source: Elhoushi et al., LayerSkip, section 4.3, arXiv:2404.16710; there the model is trained
    for it, here it is as it is.

    Attributes:
        layers: of the target that draft; fewer than it has.
    """

    layers: int = static(kw_only=True)

    def __post_init__(self) -> None:
        Drafter.__post_init__(self)
        if isinstance(self.layers, bool) or not isinstance(self.layers, int) or self.layers < 1:
            raise RequestError(
                f"layers is {self.layers!r}; it must be an integer of at least 1: layers of the "
                "model that draft"
            )

    def check(self, target: ModelConfig) -> None:
        """Raise RequestError if the target has not more layers."""
        if self.layers >= target.num_layers:
            raise RequestError(
                f"layers is {self.layers}, and the model has {target.num_layers}; a drafter of all "
                f"layers saves nothing: give 1 to {target.num_layers - 1}"
            )

    def propose(
        self,
        target: Params,
        cache: PagedCache,
        carry: Any,
        asked: Asked,
        implementation: str | None,
    ) -> tuple[Proposal, PagedCache, Any]:
        """Draw up to k drafts."""
        config = target.config
        head = config.layers[: self.layers]
        first = dataclasses.replace(
            target,
            layers=target.layers[: self.layers],
            config=dataclasses.replace(config, layers=head),
        )
        steps = Steps(params=first, first_layer=0, asked=asked, implementation=implementation)
        positions = jnp.where(asked.most > 0, asked.cached, -1)
        x, cache = steps.run(cache, asked.last_token[:, None], positions[:, None])
        proposal, cache = draw_chain(
            steps,
            cache,
            x,
            k=self.k,
            rule=self.judged_by,
            vocabulary=None,
            vocab_size=config.vocab_size,
        )
        return proposal, cache, carry
