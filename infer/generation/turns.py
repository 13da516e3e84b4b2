"""The generation loop one turn a call, or a few, for a caller that looks at every token.

A call of a compiled program costs what its loop does not: hundreds of arrays are handed over, the
program starts on a thread of XLA's, and that thread and the caller wake each other.  Most of it is
hidden by calling ahead: turn i + 1 is started before turn i is read, so that the device never waits
for the host.  The rest is made small: weights and requests are flattened once, and what the host
reads of a turn is one small array, which the next call does not donate.  What is left (a core that
hands over arrays does not compute) is shared by the turns of a call.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from infer.compiling import (
    COMMAND_BUFFERS,
    give_back_memory,
    make_room_for_programs,
    num_traces,
    record_trace,
)
from infer.generation.prepare import Caps, is_int
from infer.generation.program import one_turn
from infer.generation.slots import admit
from infer.generation.state import Requests, State, at_most_once, unfinished
from infer.models.params import Params
from infer.spec.drafters import Drafter

PROGRAM = "turn"


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What one turn did; arrays of the host, an entry per slot.

    A turn adds at most W tokens to a request, 1 or a drafter's k + 1.
    """

    request: np.ndarray  # int32 [B], whose row the slot ran; R = it was free
    num_generated: np.ndarray  # int32 [B], tokens of that request so far
    tokens: np.ndarray  # int32 [B, W], the last W of them; the first again where there are fewer
    finish: np.ndarray  # int32 [B], its Finish
    turns: int  # that have been run in all
    running: bool  # a request runs or waits
    overflow: bool  # the pool is too small for a request: no turn will run any more

    @property
    def token(self) -> np.ndarray:
        """The last token of each slot's request, int32 [B]; a prompt under way has a pad id."""
        return self.tokens[:, -1]


class Turns:
    """Calls of one turn each, or a few, of a program whose weights and requests stay the same."""

    def __init__(
        self,
        params: Params,
        requests: Requests,
        state: State,
        *,
        caps: Caps,
        drafter: Drafter | None = None,
        per_call: int = 1,
    ) -> None:
        """Take where to go on.

        Args:
            params: weights.
            requests: what is asked.
            state: where to go on; it is donated.
            caps: the static sizes that `state` and `requests` were made with.
            drafter: that `state` was made with; a turn may then add several tokens to a request.
            per_call: turns that a call runs at most.

        Raises:
            ValueError: `per_call` is no integer from 1 up, or the state is of another drafter.
        """
        if not is_int(per_call) or per_call < 1:
            raise ValueError(
                f"per_call is {per_call!r}, must be an integer of at least 1: the turns of a call"
            )
        words = None if drafter is None else str(drafter)
        if words != caps.draft or (drafter is None) != (state.speculation is None):
            raise ValueError(
                f"drafter is {words}, and the state's is {caps.draft}; pass the same: the job's own"
            )
        self._bound, bound_tree = jax.tree.flatten((params, requests, drafter))
        self._leaves, self._tree = jax.tree.flatten(_admit(state, requests))
        self._program = _program(bound_tree, self._tree, caps, per_call)

    @property
    def state(self) -> State:
        """The state after all turns that were started; donated by the next `start`."""
        return jax.tree.unflatten(self._tree, self._leaves)

    def start(self) -> Array:
        """Start the next call and return what `read` takes, without waiting for it.

        Where nothing is left to do, no turn is run.
        """
        before = num_traces(PROGRAM)
        self._leaves, seen = self._program(self._bound, self._leaves)
        if num_traces(PROGRAM) != before:
            give_back_memory()
        return seen

    def __iter__(self) -> Iterator[Turn]:
        """Yield the turns of a call when it is done, while the next call already runs.

        Who leaves off early has run the next call's turns too.
        """
        ahead = self.start()
        while True:
            following = self.start()
            for turn in read(ahead):
                yield turn
                if not turn.running or turn.overflow:
                    return
            ahead = following


def read(seen: Array) -> list[Turn]:
    """Wait for a call and return its turns; those after the last one that had anything to do say
    that nothing runs.
    """
    return [_turn_of(values) for values in np.asarray(seen)]


def _turn_of(values: np.ndarray) -> Turn:
    turns, running, overflow, width = values[-4:].tolist()
    request, num_generated, finish, *tokens = values[:-4].reshape(3 + width, -1)
    return Turn(
        request=request,
        num_generated=num_generated,
        tokens=np.stack(tokens, axis=1),
        finish=finish,
        turns=turns,
        running=bool(running),
        overflow=bool(overflow),
    )


@functools.lru_cache(maxsize=64)
def _program(
    bound_tree: Any, state_tree: Any, caps: Caps, per_call: int
) -> Callable[[list[Array], list[Array]], tuple[list[Array], Array]]:
    """Return the jitted turns of a call, on flat lists; the second is donated."""
    make_room_for_programs()

    def call(bound: list[Array], leaves: list[Array]) -> tuple[list[Array], Array]:
        record_trace(PROGRAM, vars(caps) | {"per_call": per_call})
        params, requests, drafter = jax.tree.unflatten(bound_tree, bound)
        turn = lambda state, _: _turn(params, requests, drafter, state, caps=caps)
        state = jax.tree.unflatten(state_tree, leaves)
        state, seen = lax.scan(turn, state, length=per_call)
        return jax.tree.leaves(state), seen

    options = dict(COMMAND_BUFFERS) if caps.command_buffers else None
    return jax.jit(call, donate_argnums=1, compiler_options=options)


def _turn(
    params: Params, requests: Requests, drafter: Drafter | None, state: State, *, caps: Caps
) -> tuple[State, Array]:
    """Run a turn if there is anything to do; return the state and what `read` takes."""
    request = state.request
    turn = lambda s: one_turn(
        params,
        requests,
        s,
        lanes=caps.lanes,
        drafter=drafter,
        processed_logprobs=caps.processed_logprobs,
        implementation=caps.implementation,
    )
    state = at_most_once(unfinished(state, requests) & ~state.cache.overflow, turn, state)
    output, row = state.output, jnp.minimum(request, requests.prompts.shape[0] - 1)
    count = output.lengths[row]
    width = 1 if drafter is None else drafter.k + 1
    back = jnp.arange(width - 1, -1, -1, dtype=jnp.int32)
    last = output.tokens[row[None, :], jnp.maximum(count[None, :] - 1 - back[:, None], 0)]
    seen = [
        request,
        count,
        output.finish[row].astype(jnp.int32),
        last.reshape(-1),
        jnp.stack(
            [
                state.counters.turns,
                unfinished(state, requests).astype(jnp.int32),
                state.cache.overflow.astype(jnp.int32),
                jnp.asarray(width, jnp.int32),
            ]
        ),
    ]
    return state, jnp.concatenate(seen)


_admit = jax.jit(admit, donate_argnames="state")
