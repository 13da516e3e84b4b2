"""Merging the adjacent pair with the lowest rank, over and over: what BPE with ranked tokens is."""

import heapq
from collections.abc import Collection, Mapping


def merge_pairs(
    symbols: list[str],
    ranks: Mapping[str, float],
    unused: Collection[str] = (),
) -> tuple[list[str], dict[str, tuple[str, str]]]:
    """Merge while two neighbours together have a rank; equal ranks go from the left.

    O(n log n) by a heap of pairs.

    Args:
        symbols: what to begin with; consumed.
        ranks: a rank for each text that may come out of a merge, the lowest first.
        unused: texts for which the two parts are to be told.

    Returns:
        The symbols that are left, and the parts of the unused texts that came up.
    """
    size = len(symbols)
    before = list(range(-1, size - 1))
    after = list(range(1, size + 1))
    parts: dict[str, tuple[str, str]] = {}
    heap: list[tuple[float, int, int, int]] = []

    def offer(left: int, right: int) -> None:
        text = symbols[left] + symbols[right]
        rank = ranks.get(text)
        if rank is not None:
            heapq.heappush(heap, (rank, left, right, len(text)))
            if text in unused:
                parts[text] = (symbols[left], symbols[right])

    for left in range(size - 1):
        offer(left, left + 1)
    while heap:
        _, left, right, length = heapq.heappop(heap)
        # Stale where either side was merged since: it is gone (""), or it has grown.
        if not (symbols[left] and symbols[right]):
            continue
        if len(symbols[left]) + len(symbols[right]) != length:
            continue
        symbols[left] += symbols[right]
        symbols[right] = ""
        following = after[right]
        after[left] = following
        if following < size:
            before[following] = left
            offer(left, following)
        if before[left] >= 0:
            offer(before[left], left)
    return [symbol for symbol in symbols if symbol], parts
