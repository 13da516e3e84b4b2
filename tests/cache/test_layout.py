"""The formula for a cache's bytes against what is allocated, and the seed's worked numbers."""

import dataclasses

import jax
import pytest

from infer.cache import paged
from infer.cache.layout import cached_layers, pool_bytes
from infer.plan.capacity import kv_bytes
from infer.plan.shape import AttentionShape, kv_bytes_per_token, uniform
from tests.models.tiny import gemma3_config, llama_config

MLA = AttentionShape(latent_dim=512, rope_dim=64)


@pytest.mark.parametrize("config", [llama_config(), llama_config(num_kv_heads=4), gemma3_config()])
@pytest.mark.parametrize(
    ("dtype", "head_bytes"),
    [
        ("float32", 32),
        ("bfloat16", 16),
        ("int8", 12),
        ("float8_e4m3", 12),
        ("int4", 8),
        ("int4_hadamard", 8),
    ],
)
@pytest.mark.parametrize("page_size", [1, 16])
def test_cache_bytes_match_formula(config, dtype, head_bytes, page_size) -> None:
    """MHA, GQA and sliding layers: as the allocator reserves them, whole pages in every layer."""
    cache = paged.create(
        config, num_rows=2, num_pages=7, page_size=page_size, pages_per_row=3, dtype=dtype
    )
    allocated = sum(leaf.nbytes for leaf in jax.tree.leaves((cache.k_pages, cache.v_pages)))
    assert config.head_dim == 8
    per_token = 2 * config.num_layers * config.num_kv_heads * head_bytes
    assert allocated == per_token * 7 * page_size
    assert allocated == pool_bytes(config, 7, page_size, dtype)
    assert kv_bytes_per_token(cached_layers(config, dtype)) == per_token


def test_cache_bytes_match_formula_for_latents_and_for_rings_of_a_window() -> None:
    assert kv_bytes_per_token(uniform(61, MLA)) == 70_272  # DeepSeek-V3 in bfloat16
    layers = cached_layers(gemma3_config(), "bfloat16")
    assert [layer.window for layer in layers] == [5, 5, None]
    each = 2 * 2 * 8 * 2
    assert kv_bytes(layers, 100, page_size=1, ring=True) == each * (5 + 5 + 100)
    assert kv_bytes(layers, 3, page_size=1, ring=True) == each * 9
    assert kv_bytes(layers, 100, page_size=16) == each * 3 * 112


def test_a_smaller_number_costs_less() -> None:
    half = dataclasses.replace(MLA, kv_bytes=1)
    assert kv_bytes_per_token([half]) * 2 == kv_bytes_per_token([MLA])
