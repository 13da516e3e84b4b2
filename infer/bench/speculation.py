"""A model with and without a drafter: what its drafts bring and cost, the speed-up that follows
from that, and the one that is measured.

What is measured first, on runs that are not timed as a whole:

    alpha   share of judged drafts that stand, by accepted / (accepted + rejections)
    c       time of a draft step over that of a plain decode step
    v       time of the model's pass over k + 1 tokens over that of a plain decode step

A turn of the loop is timed in bursts of a few: one that decodes, one that drafts in vain and
decodes, one that drafts and judges.  Differences of these are the drafter's time and the pass's.

    speed-up = E[tokens] o / ((1 - s) (k c + 1) + s (k c + v))

with E[tokens] = 1 + sum_i d_i alpha^i, d_i the share of a row's passes that had an i-th draft (1
throughout where k drafts are always found: then E is `plan.speculation.expected_tokens`), s the
share of turns that had a draft, and o the share of rows that still run: a batch ends with its last.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from infer.bench.compare import counted
from infer.bench.peers import QUIET_CORES
from infer.generation.facade import prepare_on
from infer.generation.host import Job
from infer.generation.prepare import RunOptions
from infer.models.params import Params
from infer.plan.speculation import acceptance_rate, best_k
from infer.sampling import SamplingParams
from infer.spec.drafters import Drafter

# A copy, code, and open prose: drafters differ by what there is to look up.
PROMPTS = {
    "copy": "Repeat this list twice, word for word.\n\n- red apples from the north orchard\n"
    "- green pears from the south wall\n- blue plums from the old tree\n\n"
    "- red apples from the north orchard\n- green pears from",
    "code": "class Stack:\n    def __init__(self):\n        self.items = []\n\n"
    "    def push(self, item):\n        self.items.append(item)\n\n    def pop(self):\n",
    "prose": "The lighthouse keeper had lived alone on the island for eleven years when",
    "facts": "Water boils at 100 degrees Celsius at sea level. On a high mountain it boils",
}
# Pairs of bursts that time each kind of turn.
_TIMINGS = 3


@dataclass(frozen=True, kw_only=True)
class Brought:
    """What the drafts of whole runs brought: sums over all rows and turns."""

    tokens: int  # that came out
    row_passes: int  # passes of the model, counted a row
    passes: int  # turns that generated
    with_drafts: int  # those of them that judged drafts
    drafted: tuple[int, ...]  # by position, k of them
    accepted: tuple[int, ...]

    @property
    def alpha(self) -> float:
        """Probability that a draft stands, given that those before it do."""
        before = (self.drafted[0], *self.accepted[:-1])
        judged = sum(map(min, before, self.drafted))
        stood = sum(self.accepted)
        return acceptance_rate(stood, judged - stood)

    def expected_tokens(self) -> float:
        """Return what a row's pass brings with `alpha` at every position."""
        if not self.drafted[0]:
            return 1.0
        stands = (self.alpha ** (i + 1) for i in range(len(self.drafted)))
        chance = (d / self.row_passes for d in self.drafted)
        return 1.0 + math.fsum(d * p for d, p in zip(chance, stands, strict=True))


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of a turn of each kind."""

    plain: float  # decodes a token of every row
    in_vain: float  # drafts, and decodes
    judged: float  # drafts, and judges k drafts of every row


def predicted_speedup(brought: Brought, costs: Costs, batch: int) -> float:
    """Return tokens per second with drafts over those without, by the formula above."""
    share = brought.with_drafts / brought.passes
    turn = (1 - share) * costs.in_vain + share * costs.judged
    still_run = brought.row_passes / (brought.passes * batch)
    return brought.expected_tokens() * still_run * costs.plain / turn


def measure(
    params: Params,
    prompts: Sequence[Sequence[int]],
    drafter: Drafter,
    *,
    batch: int,
    new_tokens: int,
    rounds: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Return all figures of one pair at one batch size.

    Args:
        params: the model's weights.
        prompts: token ids; groups of `batch` run together, repeated to a whole number of groups.
        drafter: proposes k drafts in every turn; an `adaptive` one is made not to choose.
        batch: rows at once.
        new_tokens: of each row, past end-of-sequence ids.
        rounds: in each of which all groups run once without and once with drafts, in turns.
        say: takes a line about what goes on.

    Raises:
        ValueError: so many tokens have no room in the model's context, or are too few to time.
    """
    longest, context = max(map(len, prompts)), params.config.max_context
    if longest + new_tokens > context:
        raise ValueError(
            f"{new_tokens} tokens a row after a prompt of {longest} pass the model's context of "
            f"{context}; give at most {context - longest}"
        )
    fixed = dataclasses.replace(drafter, adaptive=False)
    groups = _groups(prompts, batch)
    pair = _Pair(params=params, drafter=fixed, batch=batch, new_tokens=new_tokens)
    say(f"batch {batch}: {len(groups)} runs without drafts, to compile and to warm up")
    plain_tokens = [_tokens(pair.run(group, None)) for group in groups]
    say(f"batch {batch}: the same with {fixed.k} drafts a turn")
    jobs = [pair.run(group, fixed) for group in groups]
    equal = all(_tokens(job) == old for job, old in zip(jobs, plain_tokens, strict=True))
    brought = _brought(jobs)
    say(f"batch {batch}: turns of each kind")
    costs = pair.costs(groups)
    ratios, speeds = [], []
    for number in range(1, rounds + 1):
        seconds = pair.turn_about(groups, number)
        ratios.append(seconds[0] / seconds[1])
        speeds.append([len(groups) * batch * (new_tokens - 1) / s for s in seconds])
        say(f"batch {batch}: round {number} of {rounds}: {ratios[-1]:.3f} times as fast")
    predicted, measured = predicted_speedup(brought, costs, batch), statistics.median(ratios)
    alpha = None if math.isnan(brought.alpha) else brought.alpha
    step = (costs.in_vain - costs.plain) / costs.plain / fixed.k
    k, at_best = (0, 1.0) if alpha is None else best_k(alpha, max(step, 0.0))
    return {
        "batch": batch,
        "k": fixed.k,
        "new_tokens": new_tokens,
        "runs": len(groups),
        "alpha": alpha,
        "acceptance_by_position": [
            a / d if d else None for a, d in zip(brought.accepted, brought.drafted, strict=True)
        ],
        "c": step,
        "v": 1 + (costs.judged - costs.in_vain) / costs.plain,
        "plain_turn_s": costs.plain,
        "turns_with_drafts": brought.with_drafts / brought.passes,
        "expected_tokens": brought.expected_tokens(),
        "tokens_per_pass": brought.tokens / brought.row_passes,
        "predicted_speedup": predicted,
        "measured_speedup": measured,
        "measured_range": [min(ratios), max(ratios)],
        "predicted_over_measured": predicted / measured,
        "best_k": k,
        "speedup_at_best_k": at_best,
        "plain_tokens_per_s": statistics.median(s[0] for s in speeds),
        "draft_tokens_per_s": statistics.median(s[1] for s in speeds),
        "equal_tokens": equal,
    }


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """A model and its drafter."""

    params: Params
    drafter: Drafter
    batch: int
    new_tokens: int

    def job(self, group: Sequence[Sequence[int]], drafter: Drafter | None) -> Job:
        """Return a group's job, all its rows at once."""
        sampling = SamplingParams(temperature=0, max_tokens=self.new_tokens, ignore_eos=True)
        options = RunOptions(num_slots=self.batch, draft=drafter, share_prefixes=False)
        return prepare_on(None, self.params, group, None, None, sampling, None, options)

    def run(self, group: Sequence[Sequence[int]], drafter: Drafter | None) -> Job:
        """Return the job after its end."""
        job = self.job(group, drafter)
        job.run_all()
        return job

    def turn_about(self, groups: Sequence[Any], number: int) -> tuple[float, float]:
        """Return the seconds that all groups decode without and with drafts, run in turns."""
        kinds = [None, self.drafter]
        seconds = [0.0, 0.0]
        for group in groups:
            for which in (0, 1) if number % 2 else (1, 0):
                seconds[which] += self.run(group, kinds[which]).decode_s
        return seconds[0], seconds[1]

    def costs(self, groups: Sequence[Any]) -> Costs:
        """Return the time of each kind of turn: medians over jobs, the last one first."""
        found = []
        for number in range(_TIMINGS):
            job = self.job(groups[number % len(groups)], self.drafter)
            job.run_to_first_tokens()
            times = job.time_turns()
            if times is not None:
                found.append(times)
        if not found:
            raise ValueError(
                f"{self.new_tokens} tokens a row are too few to time turns of {self.drafter.k} "
                f"drafts; give at least {16 * (self.drafter.k + 1)}"
            )
        plain, *_, judged, in_vain = np.median(np.asarray(found), axis=0).tolist()
        return Costs(plain=plain, in_vain=in_vain, judged=judged)


def _groups(prompts: Sequence[Sequence[int]], batch: int) -> list[list[list[int]]]:
    count = -(-len(prompts) // batch) * batch
    rows = [list(prompts[i % len(prompts)]) for i in range(count)]
    return [rows[i : i + batch] for i in range(0, count, batch)]


def _tokens(job: Job) -> list[list[int]]:
    tokens = np.asarray(job.state.output.tokens)
    return [tokens[i, : job.caps.new_tokens].tolist() for i in range(len(job.rows))]


def _brought(jobs: Sequence[Job]) -> Brought:
    carried = [jax.device_get(job.state.speculation) for job in jobs]
    total = lambda name: np.sum([np.asarray(getattr(c, name)) for c in carried], axis=0)
    passes = total("passes")
    return Brought(
        tokens=int(total("tokens")),
        row_passes=int(total("row_passes")),
        passes=int(passes.sum()),
        with_drafts=int(passes[1:].sum()),
        drafted=tuple(total("drafted").tolist()),
        accepted=tuple(total("accepted").tolist()),
    )


def text_of(found: dict[str, Any]) -> str:
    """Return the figures as lines for people."""
    lines = [
        f"{found['model']} with {found['draft']} on {found['cpu']}, "
        f"{counted(found['threads'], 'thread')}, {counted(found['rounds'], 'round')}"
    ]
    for r in found["results"]:
        alpha = "none judged" if r["alpha"] is None else f"{r['alpha']:.3f}"
        lines += [
            f"batch {r['batch']}, k = {r['k']}: alpha {alpha}, c {r['c']:.3f}, v {r['v']:.3f}, "
            f"{r['tokens_per_pass']:.2f} tokens a pass",
            f"  predicted {r['predicted_speedup']:.3f}, measured {r['measured_speedup']:.3f} "
            f"({r['plain_tokens_per_s']:.1f} to {r['draft_tokens_per_s']:.1f} tokens/s), "
            f"predicted/measured {r['predicted_over_measured']:.3f}",
            f"  if judging all drafts cost no more than a step (v = 1), best k {r['best_k']}: "
            f"{r['speedup_at_best_k']:.2f} times"
            + ("" if r["equal_tokens"] else "; THE TOKENS DIFFER"),
        ]
    if found["busy_cores"] > QUIET_CORES:
        lines.append(
            f"other work took {found['busy_cores']:.1f} cores: do not rely on these figures"
        )
    return "\n".join(lines)
