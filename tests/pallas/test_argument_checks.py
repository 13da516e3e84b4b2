"""What attention kernels refuse: shapes that do not belong together, traced numbers, odd sizes."""

import dataclasses
import functools
import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.pallas.argument_checks import as_int32, check_numbers, check_shapes
from infer.pallas.cascade_attention import cascade_attention
from infer.pallas.flash_attention import (
    FlashAttentionBlocks,
    flash_attention,
    flash_attention_ragged,
)
from infer.pallas.flash_attention_backward import FlashAttentionBackwardBlocks
from infer.pallas.mla_decode import MlaDecodeBlocks, mla_decode
from infer.pallas.paged_attention import PagedAttentionBlocks, paged_attention
from infer.pallas.paged_prefill import PagedPrefillBlocks, paged_prefill
from tests.pallas.paged_cases import f32, paged_case

pytestmark = pytest.mark.kernels

CASE = paged_case([9, 4], heads=4, kv=2, width=16, queries=3, pages_a_row=2)
PAGES = CASE.k_pages.shape[0]


def _unchecked(op: Any) -> Any:
    """Return the op as users have it, without the tests' own checks of annotations."""
    return functools.partial(inspect.unwrap(op), interpret=True)


@functools.cache
def _plain() -> jax.Array:
    return paged_attention(*CASE, scale=0.5, interpret=True)


def _zeros(*shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.zeros(shape, dtype)


PAGED: list[tuple[dict[str, Any], str]] = [
    ({"q": _zeros(2, 4, 16)}, "q has the shape [2, 4, 16], 3 axes; give it 4"),
    ({"q": _zeros(2, 3, 4, 16, dtype="int32")}, "q is int32; its dtype must be floating"),
    ({"page_table": _zeros(1, 2, dtype="int32")}, "page_table has the shape [1, 2], not [B, M]"),
    ({"page_table": _zeros(2, 2)}, "page_table is float32; its dtype must be an integer one"),
    ({"page_table": _zeros(2, 0, dtype="int32")}, "M = 0: an empty axis"),
    ({"positions": _zeros(2, 4, dtype="int32")}, "positions has the shape [2, 4]"),
    ({"positions": _zeros(2, dtype="int32")}, "1 axes; give it 2: [B, T]"),
    ({"positions": _zeros(2, 3)}, "positions is float32"),
    ({"v_pages": _zeros(PAGES, 2, 5, 8)}, "v_pages has the shape"),
    ({"sinks": _zeros(2)}, "sinks has the shape [2], not [N] with N = 4 (as in q)"),
    ({"k_scales": _zeros(PAGES, 2, 4)}, "k_scales has the shape"),
    ({"window": 2.5}, "window must be a Python integer"),
    ({"window": 0}, "window is 0"),
    ({"softcap": 0.0}, "softcap is 0.0"),
    ({"scale": -1.0}, "scale is -1.0"),
    ({"scale": float("inf")}, "scale is inf"),
]


@pytest.mark.parametrize(("change", "text"), PAGED)
def test_paged_ops_refuse_what_does_not_belong_together(change: dict[str, Any], text: str) -> None:
    arguments = {**CASE._asdict(), "scale": 1.0, **change}
    for op in (paged_attention, paged_prefill):
        with pytest.raises(ValueError, match=re.escape(text)):
            _unchecked(op)(**arguments)
    cascade = {
        "prefix_table": _zeros(1, 1, dtype="int32"),
        "prefix_lengths": _zeros(1, dtype="int32"),
    }
    with pytest.raises(ValueError, match=re.escape(text)):
        _unchecked(cascade_attention)(**arguments, **cascade)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"bounds": _zeros(2, 3, dtype="int32")}, "not [B, 2] with 2 = 2 (always)"),
        ({"tree": _zeros(2, 3, 4, dtype="bool")}, "not [B, T, T] with T = 3"),
        ({"tree": _zeros(2, 3, 3)}, "tree is float32; give booleans"),
    ],
)
def test_decode_refuses_bounds_and_trees_of_others(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        _unchecked(paged_attention)(*CASE, scale=1.0, **change)


def test_cascade_refuses_a_table_of_other_groups() -> None:
    with pytest.raises(ValueError, match=re.escape("prefix_lengths has the shape [3], not [C]")):
        _unchecked(cascade_attention)(
            *CASE[:3],
            _zeros(2, 1, dtype="int32"),
            _zeros(3, dtype="int32"),
            *CASE[3:],
            scale=1.0,
        )


def test_mla_refuses_what_does_not_belong_together() -> None:
    call = functools.partial(_unchecked(mla_decode), rank=8, scale=1.0)
    latents = CASE.k_pages[:, 0]
    for change, text in (
        ({"positions": CASE.positions[:1]}, "positions has the shape [1, 3]"),
        ({"latent_pages": latents[..., :8]}, "latent_pages has the shape"),
        ({"page_table": CASE.page_table.astype(jnp.float32)}, "page_table is float32"),
    ):
        arguments = {
            "q": CASE.q,
            "latent_pages": latents,
            "page_table": CASE.page_table,
            "positions": CASE.positions,
        }
        with pytest.raises(ValueError, match=re.escape(text)):
            call(**{**arguments, **change})
    wide = _zeros(1, 1, 1, 640)
    one = _zeros(1, 1, dtype="int32")
    with pytest.raises(NotImplementedError, match="ranks up to 512"):
        mla_decode(wide, _zeros(1, 4, 640), one, one, rank=576, scale=1.0)


def test_flash_refuses_what_does_not_belong_together() -> None:
    q, k = _zeros(2, 20, 4, 16), _zeros(2, 20, 2, 16)
    dense, ragged = _unchecked(flash_attention), _unchecked(flash_attention_ragged)
    with pytest.raises(ValueError, match=re.escape("lengths has the shape [3], not [B]")):
        dense(q, k, k, scale=1.0, lengths=_zeros(3, dtype="int32"))
    with pytest.raises(ValueError, match="lengths are float32; give integers"):
        dense(q, k, k, scale=1.0, lengths=_zeros(2))
    with pytest.raises(ValueError, match=re.escape("sinks has the shape [2], not [N]")):
        dense(q, k, k, scale=1.0, sinks=_zeros(2))
    with pytest.raises(ValueError, match=re.escape("starts has the shape [1, 2]")):
        ragged(q[0], k[0], k[0], _zeros(1, 2, dtype="int32"), scale=1.0)
    with pytest.raises(ValueError, match=re.escape("k has the shape [10, 2, 16], not [T, K, H]")):
        ragged(q[0], k[0, :10], k[0, :10], _zeros(2, dtype="int32"), scale=1.0)


def test_wide_heads_are_refused() -> None:
    case = paged_case([3], heads=1, kv=1, width=320, pages_a_row=1)
    for op in (paged_attention, paged_prefill):
        with pytest.raises(NotImplementedError, match=r"in Triton: q \[1, 1, 1, 320\] of float32"):
            op(*case, scale=1.0, interpret=True)


def test_sizes_that_no_small_chip_holds_in_float32_are_refused() -> None:
    case = paged_case([3], heads=1, kv=1, width=128, pages_a_row=1)
    with pytest.raises(NotImplementedError, match="with 16 rows needs 106496 bytes"):
        paged_attention(*case, scale=1.0, blocks=PagedAttentionBlocks())
    with pytest.raises(NotImplementedError, match="with 128 rows needs 114688 bytes"):
        paged_prefill(*case, scale=1.0, blocks=PagedPrefillBlocks())


def test_numbers_are_python_numbers() -> None:
    assert check_numbers("op", np.float32(0.5), np.int64(3), 2) == (0.5, 3, 2.0)
    for name in ("scale", "window", "softcap"):
        numbers = {"scale": 1.0}
        with pytest.raises(ValueError, match=f"op: {name} must be a Python"):
            jax.jit(lambda x, name=name, n=numbers: check_numbers("op", **(n | {name: x})))(1)
    # As many keys as there are: the result without a window.
    o = _unchecked(paged_attention)(*CASE, scale=np.float32(0.5), window=np.int64(10))
    np.testing.assert_array_equal(f32(o), f32(_plain()))


def test_shapes_by_letters() -> None:
    check_shapes("op", x=(_zeros(2, 3), "A B"), y=(None, "A C"), z=(_zeros(3, 2), "B 2"))
    with pytest.raises(ValueError, match=re.escape("op: z has the shape [2, 2], not [B, 2]")):
        check_shapes("op", x=(_zeros(2, 3), "A B"), z=(_zeros(2, 2), "B 2"))


def test_integers_of_any_width_stay_out_of_range() -> None:
    top = jnp.asarray([3, 2**32 - 1], jnp.uint32)
    np.testing.assert_array_equal(as_int32(top), [3, 2**31 - 1])
    np.testing.assert_array_equal(as_int32(jnp.asarray([-1, 7], jnp.int8)), [-1, 7])
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        long = lambda x: jnp.asarray(np.asarray(x), jnp.int64)
        case = CASE._replace(page_table=long(CASE.page_table), positions=long(CASE.positions))
        assert case.page_table.dtype == jnp.int64
        o = paged_attention(*case, scale=0.5, interpret=True)
        chunk = paged_prefill(*case, scale=0.5, interpret=True)
    np.testing.assert_allclose(f32(o), f32(_plain()), rtol=1e-6)
    np.testing.assert_allclose(f32(chunk), f32(_plain()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_warps": 3}, "num_warps is 3; use 1, 2, 4, 8 or 16"),
        ({"num_stages": 0}, "num_stages is 0"),
        ({"split_keys": 0}, "split_keys 0 is not a multiple"),
        ({"merge_warps": 6}, "merge_warps is 6"),
    ],
)
def test_block_sizes_that_triton_does_not_take(change: dict[str, int], text: str) -> None:
    flash = functools.partial(FlashAttentionBlocks, block_queries=32, block_keys=32)
    for sizes in (PagedAttentionBlocks, PagedPrefillBlocks, MlaDecodeBlocks, flash):
        names = {field.name for field in dataclasses.fields(getattr(sizes, "func", sizes))}
        if set(change) <= names:
            with pytest.raises(ValueError, match=re.escape(text)):
                sizes(**change)


def test_backward_sizes_come_back_from_a_dict() -> None:
    sizes = FlashAttentionBackwardBlocks.for_shape(64, 64, "bfloat16")
    assert dataclasses.replace(sizes, **dataclasses.asdict(sizes)) == sizes
