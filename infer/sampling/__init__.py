"""Sampling parameters, and the pure functions from logits to tokens.

Order, fixed: masks and bias -> penalties -> temperature -> top_k -> top_p on the renormalised row
-> min_p -> draw.  Log-probabilities are those of the raw model unless asked otherwise.
"""

from infer.sampling.draw import (
    GREEDY_BELOW,
    filtered_logits,
    log_probabilities,
    sample,
    top_k_mask,
    top_log_probabilities,
    top_p_mask,
)
from infer.sampling.keys import Role, draw_keys, request_keys, seed_words
from infer.sampling.params import SamplingParams
from infer.sampling.process import (
    History,
    banned_ids,
    mask_early_stops,
    penalise,
    process_logits,
    token_counts,
)
from infer.sampling.state import SamplingState, is_stop, take

__all__ = [
    "GREEDY_BELOW",
    "History",
    "Role",
    "SamplingParams",
    "SamplingState",
    "banned_ids",
    "draw_keys",
    "filtered_logits",
    "is_stop",
    "log_probabilities",
    "mask_early_stops",
    "penalise",
    "process_logits",
    "request_keys",
    "sample",
    "seed_words",
    "take",
    "token_counts",
    "top_k_mask",
    "top_log_probabilities",
    "top_p_mask",
]
