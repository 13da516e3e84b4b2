"""Which requests of one call begin alike, found on the host before anything runs."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Prefixes:
    """As in `Requests`, int32 [R] each."""

    parent: np.ndarray
    shared: np.ndarray
    last_child: np.ndarray

    @classmethod
    def none(cls, num_requests: int) -> "Prefixes":
        """Return that nobody shares anything."""
        full = lambda value: np.full(num_requests, value, np.int32)
        return cls(full(num_requests), full(0), full(-1))


def find_prefixes(
    prompts: list[list[int]],
    spans: list[int],
    scored: list[bool],
    num_requests: int,
    block: int,
    whole_page: int = 1,
) -> Prefixes:
    """Return for each row the earlier row that has most of its prompt, in whole blocks or whole.

    Args:
        prompts: ids.
        spans: of two rows that share, these are equal: what their keys depend on beside the ids.
        scored: rows whose every prompt token must go through the layers: they share nothing of
            others.
        num_requests: R, with the padding rows.
        block: tokens.
        whole_page: a prompt is shared whole where its length is a multiple of it.
    """
    found = Prefixes.none(num_requests)
    whole: dict[tuple[int, bytes], int] = {}
    # A block's node is known by its parent node and its ids; its value is (node, first row).
    blocks: dict[tuple[int, bytes], tuple[int, int]] = {}
    roots: dict[int, int] = {}
    for row, (prompt, span) in enumerate(zip(prompts, spans, strict=True)):
        ids = np.asarray(prompt, np.int32)
        equal = whole.setdefault((span, ids.tobytes()), row)
        node = roots.setdefault(span, -1 - len(roots))
        parent, shared = num_requests, 0
        for end in range(block, len(ids) + 1, block):
            key = (node, ids[end - block : end].tobytes())
            node, owner = blocks.setdefault(key, (len(blocks), row))
            # At least one token is left to compute: what follows it is not kept for a block.
            if owner < row and end < len(ids):
                parent, shared = owner, end
        if equal < row and len(ids) % whole_page == 0:
            parent, shared = equal, len(ids)
        if parent < num_requests and not scored[row]:
            found.parent[row], found.shared[row] = parent, shared
            found.last_child[parent] = row
    return found
