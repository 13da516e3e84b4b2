"""Paged caches for tests of kernels: scattered pages, and NaN wherever no row has a token."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from infer.quant.kv import quantize_kv


class PagedCase(NamedTuple):
    """Arguments of a paged attention op."""

    q: Array
    k_pages: Array
    v_pages: Array
    page_table: Array
    positions: Array

    def row(self, b: int) -> "PagedCase":
        """Return row b alone."""
        cut = lambda x: x[b : b + 1]
        return self._replace(
            q=cut(self.q), page_table=cut(self.page_table), positions=cut(self.positions)
        )


def paged_case(
    last: list[int],
    *,
    heads: int,
    kv: int,
    width: int,
    queries: int = 1,
    dtype: str = "float32",
    page: int = 5,
    pages_a_row: int = 18,
    seed: int = 0,
) -> PagedCase:
    """Return rows whose last tokens stand at `last` (-1: none), the queries being the last ones."""
    rng = np.random.default_rng(seed)
    need = [-(-(n + 1) // page) for n in last]
    num_pages = sum(need) + 2
    order = iter(rng.permutation(num_pages - 1).tolist())  # the last page is nobody's
    table = np.full((len(last), pages_a_row), num_pages, np.int32)
    pools = np.full((2, num_pages, kv, page, width), np.nan)
    for b, n in enumerate(last):
        table[b, : need[b]] = [next(order) for _ in range(need[b])]
        for j in range(n + 1):
            pools[:, table[b, j // page], :, j % page] = rng.standard_normal((2, kv, width))
    positions = np.asarray(last)[:, None] - np.arange(queries)[::-1][None, :]
    q = rng.standard_normal((len(last), queries, heads, width))
    return PagedCase(
        *(jnp.asarray(x, dtype) for x in (q, *pools)),
        jnp.asarray(table),
        jnp.asarray(np.maximum(positions, -1), jnp.int32),
    )


def quantized(
    case: PagedCase, kv_format: str, scale_dtype: str = "float32"
) -> tuple[PagedCase, dict[str, Array]]:
    """Return the case with 8- or 4-bit pools, and the scales; unused memory has scale NaN."""
    out = {}
    for name in ("k", "v"):
        pool = getattr(case, f"{name}_pages")
        data, scales = quantize_kv(jnp.nan_to_num(pool), kv_format, jnp.dtype(scale_dtype))
        out[f"{name}_pages"] = data
        scales = jnp.where(jnp.isnan(pool[..., 0]), jnp.nan, scales)
        out[f"{name}_scales"] = scales.astype(scale_dtype)
    pools = {name: out.pop(name) for name in ("k_pages", "v_pages")}
    return case._replace(**pools), out


def f32(x: Array) -> np.ndarray:
    """Return x as float32 in numpy."""
    return np.asarray(x, np.float32)
