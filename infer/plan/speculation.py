"""When speculation pays: expected tokens of a round, speed-up, the best number of drafts.

A round costs k draft steps and one pass of the target over k + 1 tokens, and emits the drafts that
stand and one token more.  With a probability alpha that a draft stands, the same for each and
independent,

    E[tokens] = sum_{i=0..k} alpha^i = (1 - alpha^(k+1)) / (1 - alpha)
    speed-up  = E[tokens] / (k c + v)

where c is the time of a draft step over the time of a plain decode step, and v that of the target's
pass over k + 1 tokens; v = 1 while the target is bound by bandwidth.

Source: Leviathan et al., Fast Inference from Transformers via Speculative Decoding, section 3.3,
arXiv:2211.17192.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from infer.hardware import Chip
from infer.plan.capacity import PAGE_SIZE, kv_bytes, num_pages
from infer.plan.roofline import decode_step, decode_step_on, kv_bytes_read
from infer.plan.shape import ModelShape, kv_bytes_per_token

MOST_DRAFTS = 64  # a round that `best_k` looks at


def expected_tokens(alpha: float, k: int) -> float:
    """Return the tokens that a round emits on average, 1 to k + 1.

    Args:
        alpha: probability that a draft stands, given that those before it do; 0 to 1.
        k: drafts a round; 0 is plain decoding.
    """
    _check_alpha(alpha)
    _check_k(k, 0)
    if alpha in (0, 1):
        return 1.0 + alpha * k
    # By expm1: exact near alpha = 1 too.
    return math.expm1((k + 1) * math.log(alpha)) / (alpha - 1)


def expected_tokens_by_position(alphas: Sequence[float]) -> float:
    """Return the same where draft i stands with its own probability alphas[i], as measured."""
    stands = [1.0]
    for alpha in alphas:
        _check_alpha(alpha)
        stands.append(stands[-1] * alpha)
    return math.fsum(stands)


def acceptance_rate(accepted: int, rejections: int) -> float:
    """Return the maximum-likelihood alpha of rounds that were watched.

    accepted / (accepted + rejections): drafts after a rejection were not judged and do not count,
    so this is not accepted over drafted, which is lower.  NaN where nothing was judged.

    Args:
        accepted: drafts that stood, over all rounds.
        rejections: rounds in which one did not.
    """
    if accepted < 0 or rejections < 0:
        raise ValueError(
            f"accepted is {accepted} and rejections {rejections}; both are counts, 0 or more"
        )
    judged = accepted + rejections
    return accepted / judged if judged else math.nan


def speedup(alpha: float, k: int, c: float, v: float = 1.0) -> float:
    """Return the speed-up over plain decoding: E[tokens] / (k c + v).

    Args:
        alpha: probability that a draft stands; 0 to 1.
        k: drafts a round, 0 or more.
        c: time of a draft step, in plain decode steps of the target; 0 or more.
        v: time of the target's pass over k + 1 tokens, in the same; above 0.
    """
    if not (math.isfinite(c) and c >= 0):
        raise ValueError(f"c is {c}; a draft step costs a finite number of target steps, 0 or more")
    if not (math.isfinite(v) and v > 0):
        raise ValueError(f"v is {v}; a pass costs a finite number of target steps above 0")
    return expected_tokens(alpha, k) / (k * c + v)


def best_k(alpha: float, c: float, *, most: int = MOST_DRAFTS) -> tuple[int, float]:
    """Return the number of drafts that is fastest, and its speed-up; (0, 1.0) where none pays.

    Args:
        alpha: probability that a draft stands; 0 to 1.
        c: time of a draft step, in decode steps of the target; 0 or more.
        most: drafts a round at most; at least 1.  With c = 0 more is always better.
    """
    _check_k(most, 1)
    k = max(range(most + 1), key=lambda k: (speedup(alpha, k, c), -k))
    return k, speedup(alpha, k, c)


def choose_k(
    alphas: Sequence[float],
    round_s: Mapping[int, float],
    *,
    current: int,
    margin: float = 0.05,
) -> int:
    """Return the k of a measured table with the most tokens per second, unless `current` is near.

    E[tokens at k] / round_s[k], with `alphas` as far as k.  They must come from earlier rounds: a k
    that depended on the drafts it is for would change the output.

    Args:
        alphas: probability that draft i stands, given that those before it do; at least as many as
            the largest k.
        round_s: seconds of a round with k drafts, at the present batch; 0 is plain decoding.
        current: k of the last round, in the table.
        margin: share by which another k must be faster to replace `current`, so that noise in the
            figures does not change programs; 0 or more.
    """
    if current not in round_s or not all(0 <= k <= len(alphas) for k in round_s):
        raise ValueError(
            f"the table has k {sorted(round_s)}, current is {current}, and there are {len(alphas)} "
            "acceptances; current must be in the table, and each k from 0 to their number"
        )
    if not all(math.isfinite(s) and s > 0 for s in round_s.values()) or not margin >= 0:
        raise ValueError(
            f"margin is {margin} and round_s {dict(round_s)}; seconds are finite and above 0, and "
            "the margin 0 or more"
        )
    rate = {k: expected_tokens_by_position(alphas[:k]) / s for k, s in round_s.items()}
    best = max(rate, key=lambda k: (rate[k], -k))
    return best if rate[best] > rate[current] * (1 + margin) else current


@dataclass(frozen=True, kw_only=True)
class RoundPlan:
    """Lower bounds of a round on a chip, and what speculation costs in memory and in waste."""

    k: int
    expected_tokens: float  # a sequence and round
    draft_s: float  # k draft steps
    verify_s: float  # the target's pass over k + 1 tokens a sequence
    plain_s: float  # a decode step without speculation
    rejected_tokens: float  # a sequence and round: computed, cached and thrown away
    draft_weight_bytes: float
    draft_kv_bytes: float  # of the drafter's cache, all sequences
    slot_bytes: float  # of the target's cache: pages for the k drafts in flight, all sequences

    @property
    def round_s(self) -> float:
        """Seconds of a round."""
        return self.draft_s + self.verify_s

    @property
    def speedup(self) -> float:
        """Tokens per second over those of plain decoding."""
        return self.expected_tokens * self.plain_s / self.round_s

    @property
    def extra_bytes(self) -> float:
        """Memory that speculation takes."""
        return self.draft_weight_bytes + self.draft_kv_bytes + self.slot_bytes

    @property
    def rejected_share(self) -> float:
        """Share of the target's computed tokens that are thrown away."""
        return self.rejected_tokens / (self.k + 1)


def plan_round(
    target: ModelShape,
    draft: ModelShape | None,
    chip: Chip,
    *,
    alpha: float,
    k: int,
    batch: int = 1,
    context: int = 0,
    page_size: int = PAGE_SIZE,
    dtype: str = "bf16",
) -> RoundPlan:
    """Return what a round of `batch` sequences costs on `chip`, by the roofline.

    The target's pass multiplies with B (k + 1) tokens and reads its weights and every sequence's
    cache once: max(2 N B (k + 1) / F, (weights + B KV) / BW).  The k drafts in flight need room in
    both caches, whether they stand or not; a rejected one's is given back after the round.

    Args:
        target: the model whose distribution is kept.
        draft: the drafter; None for one without weights, such as prompt lookup, taken as free.
        chip: both run on it.
        alpha: probability that a draft stands; 0 to 1.
        k: drafts a round; 0 is plain decoding, for which there is no drafter.
        batch: sequences; at least 1.
        context: tokens in each sequence's cache before the round.
        page_size: tokens a page of both caches.
        dtype: of the arithmetic.
    """
    tokens = expected_tokens(alpha, k)
    if batch < 1 or context < 0:
        raise ValueError(
            f"batch is {batch} and context {context}; batch is at least 1 and context at least 0"
        )
    plain = decode_step_on(target, chip, batch=batch, context=context, dtype=dtype)
    check = decode_step(
        num_params=target.num_params,
        weight_bytes=target.weight_bytes + batch * kv_bytes_read(target.layers, context),
        batch=batch * (k + 1),
        kv_bytes_each=0,
        peak_flops=chip.peak_flops(dtype),
        bandwidth=chip.bandwidth,
    )
    draft_s = weights = draft_kv = 0.0
    if draft is not None and k:
        # The cache grows by a token a step.
        steps = (
            decode_step_on(draft, chip, batch=batch, context=context + i, dtype=dtype).seconds
            for i in range(k)
        )
        draft_s, weights = math.fsum(steps), draft.weight_bytes
        draft_kv = batch * kv_bytes(draft.layers, context + k, page_size=page_size)
    # Plain decoding has room for the next token too.
    pages = num_pages(context + k + 1, page_size) - num_pages(context + 1, page_size)
    return RoundPlan(
        k=k,
        expected_tokens=tokens,
        draft_s=draft_s,
        verify_s=check.seconds,
        plain_s=plain.seconds,
        rejected_tokens=k + 1 - tokens,
        draft_weight_bytes=weights,
        draft_kv_bytes=draft_kv,
        slot_bytes=batch * pages * page_size * kv_bytes_per_token(target.layers),
    )


def best_round(
    target: ModelShape,
    draft: ModelShape | None,
    chip: Chip,
    *,
    alpha: float,
    batch: int = 1,
    context: int = 0,
    most: int = MOST_DRAFTS,
    page_size: int = PAGE_SIZE,
    dtype: str = "bf16",
) -> RoundPlan:
    """Return the fastest round; k = 0 where no speculation is fastest, as in large batches.

    Arguments as those of `plan_round`; `most` is the largest k that is looked at.
    """
    _check_k(most, 1)
    plans = [
        plan_round(
            target,
            draft,
            chip,
            alpha=alpha,
            k=k,
            batch=batch,
            context=context,
            page_size=page_size,
            dtype=dtype,
        )
        for k in range(most + 1)
    ]
    return max(plans, key=lambda plan: (plan.speedup, -plan.k))


def _check_alpha(alpha: float) -> None:
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is {alpha}; it is a probability, 0 to 1")


def _check_k(k: int, least: int) -> None:
    if isinstance(k, bool) or not isinstance(k, int) or k < least:
        raise ValueError(f"k is {k!r}; it must be an integer of at least {least}: drafts a round")
