"""Bytes of a cache: literals worked by hand, then laws on random shapes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.plan import capacity
from infer.plan.shape import AttentionShape, ModelShape, kv_bytes_per_token, uniform

KIB, GIB = 2**10, 2**30


def gqa(num_kv_heads: int, head_dim: int, window: int | None = None) -> AttentionShape:
    return AttentionShape(
        num_kv_heads=num_kv_heads, k_head_dim=head_dim, v_head_dim=head_dim, window=window
    )


LLAMA3_8B = uniform(32, gqa(8, 128))
LLAMA3_70B = uniform(80, gqa(8, 128))
GPT_OSS_20B = (gqa(8, 64, window=128), gqa(8, 64)) * 12
DEEPSEEK_V3 = uniform(61, AttentionShape(latent_dim=512, rope_dim=64))


@pytest.mark.parametrize(
    ("layers", "per_token", "at_32k"),
    [
        (uniform(24, gqa(2, 64)), 12 * KIB, 0.4),  # Qwen2.5-0.5B
        (uniform(28, gqa(2, 128)), 28 * KIB, 0.9),  # Qwen2.5-1.5B
        (LLAMA3_8B, 128 * KIB, 4.0),
        (LLAMA3_70B, 320 * KIB, 10.0),
    ],
)
def test_cache_bytes_match_formula(
    layers: tuple[AttentionShape, ...], per_token: int, at_32k: float
):
    assert kv_bytes_per_token(layers) == per_token
    assert round(capacity.kv_bytes(layers, 32768) / GIB, 1) == at_32k


def test_mla_caches_the_latent_not_the_heads():
    assert kv_bytes_per_token(DEEPSEEK_V3) == 70272
    full_heads = AttentionShape(num_kv_heads=128, k_head_dim=192, v_head_dim=128)
    assert kv_bytes_per_token(uniform(61, full_heads)) == 4997120


def test_windows_counted_both_ways():
    assert 32 * capacity.kv_bytes(GPT_OSS_20B, 8192) == 12.0 * GIB
    assert 32 * capacity.kv_bytes(GPT_OSS_20B, 8192, ring=True) == 6.09375 * GIB


def test_ring_is_never_longer_than_the_context():
    layer = gqa(1, 1, window=1024)
    assert layer.visible(128) == 128
    assert capacity.kv_bytes([layer], 128, ring=True) == 128 * layer.bytes_per_token


def test_pages():
    assert [capacity.num_pages(n) for n in (0, 1, 16, 17, 1000)] == [0, 1, 1, 2, 63]
    assert capacity.num_pages(38, 16) == 3  # the sequence with pages [0, 3, 5]
    # The last, partly filled page counts whole.
    assert capacity.kv_bytes([gqa(1, 1)], 1000) == 63 * 16 * 4
    assert capacity.kv_bytes([gqa(1, 1)], 1000, page_size=1) == 1000 * 4


def test_float32_and_quantised_caches():
    wide = AttentionShape(num_kv_heads=8, k_head_dim=128, v_head_dim=128, kv_bytes=4)
    assert kv_bytes_per_token(uniform(32, wide)) == 256 * KIB
    # int8 with one 16-bit scale per 32 numbers: 34 bytes for 32 numbers.
    packed = AttentionShape(num_kv_heads=8, k_head_dim=128, v_head_dim=128, kv_bytes=34 / 32)
    assert kv_bytes_per_token([packed]) == 2 * 8 * 128 * 34 // 32


def test_seed_replica_of_eight_h100():
    """70.6 B parameters on 640 GB: about 435 GB of cache, 1.33 M tokens, 1,150 sequences."""
    budget = capacity.kv_budget(8 * 80e9, 141e9)
    assert budget == pytest.approx(435e9)
    assert budget / kv_bytes_per_token(LLAMA3_70B) == pytest.approx(1.33e6, rel=0.005)
    exact = capacity.max_concurrency(LLAMA3_70B, 1150, budget, page_size=1)
    assert exact == 1154
    assert capacity.max_concurrency(LLAMA3_70B, 1150, budget) == 1152  # 72 pages hold 1,152 tokens


def test_seed_rtx_5060():
    """Qwen2.5-1.5B in bf16 on 8 GB leaves about 4 GB: about 130,000 tokens, 64 chats of 2,000."""
    layers = uniform(28, gqa(2, 128))
    budget = capacity.kv_budget(8e9, 3.1e9)
    assert budget == pytest.approx(4.1e9)
    assert capacity.longest_context(layers, 3.75e9) == pytest.approx(130_000, rel=0.01)
    assert capacity.max_concurrency(layers, 2000, 3.75e9) == 65


def test_weights_that_do_not_fit():
    budget = capacity.kv_budget(8e9, 16e9)
    assert budget < 0
    assert capacity.max_concurrency(LLAMA3_8B, 100, budget) == 0
    assert capacity.longest_context(LLAMA3_8B, budget) == 0


def test_context_of_nothing_is_refused():
    with pytest.raises(ValueError, match="context is 0 tokens"):
        capacity.max_concurrency(LLAMA3_8B, 0, 1e9)


def test_only_rings_fit_any_length():
    layers = (gqa(2, 8, window=64),) * 3
    assert capacity.longest_context(layers, 1e6, ring=True) is None
    assert capacity.longest_context(layers, 3 * 64 * 64 - 1, ring=True) == 48


def test_model_shape_counts_layers():
    assert ModelShape(num_params=1, weight_bytes=2, layers=GPT_OSS_20B).num_layers == 24


layer_lists = st.lists(
    st.builds(
        gqa,
        st.integers(1, 4),
        st.sampled_from([8, 64]),
        window=st.sampled_from([None, 1, 17, 100]),
    ),
    min_size=1,
    max_size=4,
)


@given(layer_lists, st.integers(0, 3_000_000), st.sampled_from([1, 16]), st.booleans())
def test_longest_context_is_the_last_page_that_fits(
    layers: list[AttentionShape], budget: int, page_size: int, ring: bool
):
    longest = capacity.longest_context(layers, budget, page_size=page_size, ring=ring)
    if longest is None:
        assert ring and all(layer.window for layer in layers)
        assert capacity.kv_bytes(layers, 10**9, page_size=page_size, ring=ring) <= budget
        return
    assert longest % page_size == 0
    fits = capacity.kv_bytes(layers, longest, page_size=page_size, ring=ring)
    more = capacity.kv_bytes(layers, longest + 1, page_size=page_size, ring=ring)
    assert fits <= budget < more or (fits <= budget and more == fits)


@given(layer_lists, st.integers(1, 5000))
def test_a_ring_never_costs_more(layers: list[AttentionShape], context: int):
    full = capacity.kv_bytes(layers, context)
    assert capacity.kv_bytes(layers, context, ring=True) <= full
    assert capacity.kv_bytes(layers, context, page_size=1) <= full
    assert full < capacity.kv_bytes(layers, context, page_size=1) + 16 * kv_bytes_per_token(layers)
