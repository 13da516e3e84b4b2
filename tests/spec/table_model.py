"""The stub pair as weights that `generate` runs, and its other model as a drafter."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from infer.cache.paged import PagedCache
from infer.config import LayerConfig
from infer.models.params import Params, random_params
from infer.pytree import Leaf, pytree_dataclass
from infer.sampling import Role, filtered_logits
from infer.spec.drafters import Asked, Drafter, Proposal
from infer.spec.rounds import round_keys
from tests.models import tiny
from tests.spec.stub_pair import DRAFT, TARGET, V

_WIDTH = 8


@functools.cache
def target() -> Params:
    """Return the pair's target as weights."""
    return model_of(TARGET)


def model_of(table: Array) -> Params:
    """Return a model whose logits are the row of `table` of the last token: layers that add nothing
    to one-hot embeddings.
    """
    config = tiny.llama_config(
        vocab_size=V,
        num_tokens=V,
        hidden_size=_WIDTH,
        intermediate_size=8,
        num_heads=1,
        num_kv_heads=1,
        layers=(LayerConfig(),),
        tied_embeddings=False,
    )
    params = random_params(config, seed=0)
    layers = tuple(
        dataclasses.replace(x, o=jnp.zeros_like(x.o), down=jnp.zeros_like(x.down))
        for x in params.layers
    )
    pad = lambda rows: jnp.pad(rows, ((0, 0), (0, _WIDTH - V)))
    return dataclasses.replace(
        params,
        # Large, so that the norm's epsilon does not count: the norm makes it sqrt(D).
        embed=pad(1e3 * jnp.eye(V)),
        layers=layers,
        final_norm=jnp.ones(_WIDTH),
        lm_head=pad(table.T) / _WIDTH**0.5,
    )


@pytree_dataclass
class Table(Drafter):
    """Drafts drawn from a table of logits by the last token, with its distributions."""

    table: Leaf = None  # [V, V]

    @classmethod
    def of_draft(cls, **options: Any) -> "Table":
        """Return the other model of the pair."""
        return cls(table=DRAFT, **options)

    def propose(
        self,
        target: Params,
        cache: PagedCache,
        carry: Any,
        asked: Asked,
        implementation: str | None,
    ) -> tuple[Proposal, PagedCache, Any]:
        """Draw k tokens with the round's keys; as many count as are asked for."""
        keys = round_keys(asked.round, self.k, Role.DRAFT)
        last, tokens, probs = asked.last_token, [], []
        for j in range(self.k):
            logits = filtered_logits(self.table[last], asked.sampling)
            noise = jax.vmap(lambda key: jax.random.gumbel(key, (V,)))(keys[:, j])
            last = jnp.argmax(logits + noise, axis=-1).astype(jnp.int32)
            tokens.append(last)
            probs.append(jax.nn.softmax(logits, axis=-1))
        proposal = Proposal(
            tokens=jnp.stack(tokens, axis=1), probs=jnp.stack(probs, axis=1), count=asked.most
        )
        return proposal, cache, carry


def logits_of(params: Params, tokens: Array) -> Array:
    """Return the target's logits after each token, by its weights."""
    from infer.models import decoder

    return decoder.forward(params, tokens[:, None])[:, 0]
