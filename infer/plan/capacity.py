"""What fits: bytes of a KV cache, pages, sequences at once, the longest context.

Three numbers decide: weight bytes, KV bytes per token, memory of the chip.
"""

import math
from collections.abc import Iterable

from infer.plan.shape import AttentionShape, kv_bytes_per_token

PAGE_SIZE = 16  # tokens a page, as the cache's default
# Kept free for activations, compiled programs and fragmentation: "keep about 10%".
RESERVE = 0.10


def weight_bytes(num_params: float, bits_per_weight: float) -> float:
    """Return the bytes of weights: 16 bits each in bf16, 4.125 in INT4 with a 16-bit scale for 128
    of them.

    Args:
        num_params: weights.
        bits_per_weight: of each, its share of scales and zero points included.
    """
    return num_params * bits_per_weight / 8


def num_pages(num_tokens: int, page_size: int = PAGE_SIZE) -> int:
    """Return the pages that hold `num_tokens`; the last one lacks at most page_size - 1 tokens."""
    return -(-num_tokens // page_size)


def kv_bytes(
    layers: Iterable[AttentionShape],
    context: int,
    *,
    page_size: int = PAGE_SIZE,
    ring: bool = False,
) -> float:
    """Return the bytes that the cache of one sequence of `context` tokens takes.

    sum over layers of pages(tokens held) * page_size * bytes per token.

    Args:
        context: prompt and generated tokens together.
        page_size: tokens a page; 1 counts tokens exactly.
        ring: sliding layers keep a ring of min(context, window) tokens; otherwise, as in a page
            pool that all layers share, every layer keeps the whole context.
    """
    total = 0.0
    for layer in layers:
        held = layer.visible(context) if ring else context
        total += num_pages(held, page_size) * page_size * layer.bytes_per_token
    return total


def kv_budget(memory_bytes: float, weight_bytes: float, *, reserve: float = RESERVE) -> float:
    """Return the bytes left for the cache, memory * (1 - reserve) - weights; may be negative."""
    return memory_bytes * (1 - reserve) - weight_bytes


def max_concurrency(
    layers: Iterable[AttentionShape],
    context: int,
    budget_bytes: float,
    *,
    page_size: int = PAGE_SIZE,
    ring: bool = False,
) -> int:
    """Return how many sequences of `context` tokens fit into `budget_bytes` at once."""
    if context < 1:
        raise ValueError(f"the context is {context} tokens; it must be at least 1")
    each = kv_bytes(layers, context, page_size=page_size, ring=ring)
    return max(0, math.floor(budget_bytes / each))


def longest_context(
    layers: Iterable[AttentionShape],
    budget_bytes: float,
    *,
    page_size: int = PAGE_SIZE,
    ring: bool = False,
) -> int | None:
    """Return the most tokens of one sequence that fit into `budget_bytes`, in whole pages.

    0 means that not even one page fits.  None means that any length fits: every layer slides and
    keeps a ring.
    """
    layers = tuple(layers)
    windows = [layer.window for layer in layers if layer.window is not None]
    growing = [layer for layer in layers if not ring or layer.window is None]
    # Past the longest window the bytes grow in a straight line; below it, search.
    edges = sorted({num_pages(window, page_size) for window in windows}) if ring else []
    top = edges[-1] if edges else 0
    if kv_bytes(layers, top * page_size, page_size=page_size, ring=ring) <= budget_bytes:
        if not growing:
            return None
        left = budget_bytes - kv_bytes(layers, top * page_size, page_size=page_size, ring=ring)
        return (top + math.floor(left / (page_size * kv_bytes_per_token(growing)))) * page_size
    low, high = 0, top  # pages: low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        fits = kv_bytes(layers, middle * page_size, page_size=page_size, ring=ring) <= budget_bytes
        low, high = (middle, high) if fits else (low, middle)
    return low * page_size
