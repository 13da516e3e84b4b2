"""Two stub models over a tiny vocabulary, rounds of speculation with them, and what must come out.

The models are tables: logits of the next token by the last one.  Settings are rows of one batch, so
that one compiled program serves them all.
"""

import enum
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from infer.sampling import (
    History,
    Role,
    SamplingState,
    draw_keys,
    filtered_logits,
    process_logits,
    sample,
)
from infer.spec import rounds, verify
from infer.spec.target import is_greedy, target_logits
from infer.spec.verify import Rule

V = 4  # vocabulary
L = 4  # tokens whose joint distribution is compared: 256 cells
K = 3  # drafts
PROMPT = (2, 1)
TARGET = jnp.asarray(
    [[0.3, 1.1, -0.4, 0.0], [1.5, -0.2, 0.4, 0.1], [0.0, 0.2, 0.9, -1.0], [-0.7, 0.6, 0.5, 0.8]]
)
DRAFT = jnp.asarray(
    [[0.9, 0.2, 0.1, -0.6], [0.2, 0.8, 0.1, -0.4], [0.7, -0.3, 0.5, 0.3], [0.4, -0.2, 0.9, 0.1]]
)
SETTINGS: list[dict[str, float]] = [
    {},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.3, "frequency": 0.6, "presence": 0.3, "repetition": 1.2},
    {"temperature": 0.9, "top_k": 3, "min_p": 0.15},
]


class Drafter(enum.Enum):
    """Where drafts come from."""

    SAMPLED = "drawn from another model"
    SAME = "drawn from the target itself, without penalties"
    POINT = "a function of the context: the other model's argmax"
    COUPLED = "drawn from the other model with the plain draws' noise"


def states(settings: list[dict[str, float]], runs: int) -> SamplingState:
    """Return `runs` rows of each setting, each row a request of its own."""
    from tests.sampling.states import state_of

    names = sorted({name for s in settings for name in s})
    off = {"temperature": 1.0, "top_p": 1.0, "repetition": 1.0, "top_k": 0}
    columns = {
        name: np.repeat([s.get(name, off.get(name, 0.0)) for s in settings], runs) for name in names
    }
    return state_of(len(settings) * runs, V, **columns)


@functools.partial(jax.jit, static_argnames=("rule", "drafter", "raw_q", "q_temperature"))
def speculate(
    state: SamplingState,
    *,
    rule: Rule,
    drafter: Drafter,
    raw_q: bool = False,
    q_temperature: float = 1.0,
) -> tuple[Array, Array, Array]:
    """Return tokens [R, L], and how many drafts were accepted of how many, over all rounds.

    Args:
        state: R requests.
        rule: of verification.
        drafter: of the drafts.
        raw_q: claim the other model's distribution for drafts that are its argmax.
        q_temperature: the drafts are drawn at this temperature, the distribution claimed is at 1.
    """
    num_rows = state.num_requests
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    zero = jnp.zeros(num_rows, jnp.int32)
    table = TARGET if drafter is Drafter.SAME else DRAFT

    def one(i: Array, carry: tuple[Array, Array, Array, Array]) -> tuple[Array, ...]:
        buffer, done, accepted, drafted = carry
        history = _history(buffer, done)
        round = rounds.Round(key=state.key, choice=zero, position=done)
        # Every fourth row has any number of drafts, none included; the others have all.
        count = jnp.where(rows % 4 == 0, (rows // 4 + i) % (K + 1), K).astype(jnp.int32)
        last = _last(history)
        tokens, probs = [], []
        for j in range(K):
            logits = filtered_logits(table[last], state)
            keys = rounds.round_keys(round, K, Role.DRAFT)[:, j]
            if drafter is Drafter.COUPLED:
                keys = draw_keys(state.key, zero, done + j, Role.DRAW)
            noise = jax.vmap(lambda key: jax.random.gumbel(key, (V,)))(keys)
            noise = jnp.zeros_like(noise) if drafter is Drafter.POINT else noise
            last = jnp.argmax(logits / q_temperature + noise, axis=-1).astype(jnp.int32)
            tokens.append(last)
            probs.append(jax.nn.softmax(logits, axis=-1))
        drafts = jnp.stack(tokens, axis=1)
        before = jnp.concatenate([_last(history)[:, None], drafts], axis=1)
        logits = target_logits(TARGET[before], state, history, drafts)
        point = drafter is Drafter.POINT and not raw_q
        result = verify.verify(
            logits,
            drafts,
            None if point else jnp.stack(probs, axis=1),
            count,
            greedy=is_greedy(state),
            round=round,
            rule=rule,
        )
        running = done < L
        at = done[:, None] + jnp.arange(K + 1, dtype=jnp.int32)[None, :]
        at = jnp.where((result.tokens < V) & running[:, None], at, buffer.shape[1])
        buffer = buffer.at[rows[:, None], at].set(result.tokens, mode="drop")
        more = lambda x: jnp.sum(jnp.where(running, x, 0), dtype=jnp.int32)
        done = jnp.where(running, done + result.count, done)
        return buffer, done, accepted + more(result.num_accepted), drafted + more(count)

    nothing = jnp.zeros((), jnp.int32)
    start = (jnp.zeros((num_rows, L + K + 1), jnp.int32), zero, nothing, nothing)
    buffer, _, accepted, drafted = lax.fori_loop(0, L, one, start)
    return buffer[:, :L], accepted, drafted


@jax.jit
def plain(state: SamplingState) -> Array:
    """Return the tokens [R, L] of plain seeded sampling."""
    zero = jnp.zeros(state.num_requests, jnp.int32)

    def one(i: Array, buffer: Array) -> Array:
        history = _history(buffer, zero + i)
        logits = process_logits(TARGET[_last(history)], state, history)
        token = sample(logits, state, draw_keys(state.key, zero, zero + i, Role.DRAW))
        return buffer.at[:, i].set(token)

    return lax.fori_loop(0, L, one, jnp.zeros((state.num_requests, L), jnp.int32))


def _history(buffer: Array, done: Array) -> History:
    prompts = jnp.broadcast_to(jnp.asarray(PROMPT, jnp.int32), (buffer.shape[0], len(PROMPT)))
    lens = jnp.full(buffer.shape[0], len(PROMPT), jnp.int32)
    return History(prompts=prompts, prompt_lens=lens, generated=buffer, num_generated=done)


def _last(history: History) -> Array:
    at = jnp.maximum(history.num_generated - 1, 0)[:, None]
    token = jnp.take_along_axis(history.generated, at, axis=1)[:, 0]
    return jnp.where(history.num_generated > 0, token, PROMPT[-1])


# ---- what must come out, in plain float64 Python -------------------------------------------------


def exact(
    setting: dict[str, float], prompt: tuple[int, ...] = PROMPT, length: int = L
) -> np.ndarray:
    """Return the probability of each of the V ** length sequences."""
    table = np.asarray(TARGET, np.float64)
    probability = np.empty(V**length)
    for i, tokens in enumerate(itertools.product(range(V), repeat=length)):
        p = 1.0
        for n in range(length):
            row = table[(prompt + tokens[:n])[-1]]
            p *= _next(row, prompt, tokens[:n], setting)[tokens[n]]
        probability[i] = p
    return probability


def _next(
    row: np.ndarray, prompt: tuple[int, ...], generated: tuple[int, ...], setting: dict[str, float]
) -> np.ndarray:
    x = row.copy()
    for token in range(V):
        if token in prompt or token in generated:
            r = setting.get("repetition", 1.0)
            x[token] = x[token] / r if x[token] > 0 else x[token] * r
        x[token] -= setting.get("frequency", 0.0) * generated.count(token)
        x[token] -= setting.get("presence", 0.0) * (token in generated)
    x = x / setting.get("temperature", 1.0)
    p = np.exp(x - x.max())
    order = np.argsort(-p, kind="stable")
    p[order[int(setting.get("top_k", V)) :]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= setting.get("top_p", 1.0)]] = 0
    p[p < setting.get("min_p", 0.0) * p.max()] = 0
    return p / p.sum()
