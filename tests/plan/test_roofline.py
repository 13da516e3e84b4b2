"""The roofline's worked numbers."""

import pytest

from infer.hardware import get_chip
from infer.plan import roofline
from infer.plan.shape import AttentionShape, ModelShape, uniform

GQA8 = AttentionShape(num_kv_heads=8, k_head_dim=128, v_head_dim=128)
LLAMA3_8B = ModelShape(
    num_params=8_000_000_000, weight_bytes=16_000_000_000, layers=uniform(32, GQA8)
)


def test_batch_one_on_h100():
    step = roofline.decode_step_on(LLAMA3_8B, get_chip("h100-80gb"))
    assert step.seconds == pytest.approx(4.8e-3, rel=0.01)
    assert 1 / step.seconds == pytest.approx(210, rel=0.01)
    assert step.bound == "memory"


def test_batch_64_at_2048():
    chip = get_chip("h100-80gb")
    assert 64 * roofline.kv_bytes_read(LLAMA3_8B.layers, 2048) == pytest.approx(17.2e9, rel=0.002)
    step = roofline.decode_step_on(LLAMA3_8B, chip, batch=64, context=2048)
    assert step.seconds == pytest.approx(9.9e-3, rel=0.005)
    assert 64 / step.seconds == pytest.approx(6500, rel=0.01)
    assert step.compute_s == pytest.approx(1e-3, rel=0.05)
    assert step.bound == "memory"


def test_prefill_of_1000():
    step = roofline.prefill_on(LLAMA3_8B, get_chip("h100-80gb"), 1000)
    assert step.seconds == pytest.approx(16e-3, rel=0.02)
    assert step.bound == "compute"


@pytest.mark.parametrize(
    ("weight_bytes", "seconds", "tokens_per_s"), [(3.1e9, 6.9e-3, 145), (4.1e9, 9.15e-3, 110)]
)
def test_rtx_5060(weight_bytes: float, seconds: float, tokens_per_s: float):
    step = roofline.decode_step(
        num_params=weight_bytes / 2,
        weight_bytes=weight_bytes,
        batch=1,
        kv_bytes_each=0,
        peak_flops=get_chip("rtx-5060-8gb").bf16_flops,
        bandwidth=get_chip("rtx-5060-8gb").bandwidth,
    )
    assert step.seconds == pytest.approx(seconds, rel=0.01)
    assert 1 / step.seconds == pytest.approx(tokens_per_s, rel=0.01)


@pytest.mark.parametrize(
    ("batch", "memory_s", "compute_s"),
    [(128, 7.1e-3, 4.6e-3), (256, 8.9e-3, 9.1e-3), (512, 12.5e-3, 18.3e-3)],
)
def test_70b_replica_of_eight_h100(batch: int, memory_s: float, compute_s: float):
    """The fleet example's table: 8 chips, half of the peak, an average context of 1,150 tokens."""
    step = roofline.decode_step(
        num_params=70.6e9,
        weight_bytes=141e9,
        batch=batch,
        kv_bytes_each=1150 * 320 * 1024,
        peak_flops=8 * 989e12 / 2,
        bandwidth=8 * 3.35e12,
        overhead_s=2e-3,
    )
    assert step.memory_s == pytest.approx(memory_s, rel=0.01)
    assert step.compute_s == pytest.approx(compute_s, rel=0.01)
    assert step.seconds == max(step.memory_s, step.compute_s) + 2e-3
    assert step.bound == ("memory" if batch == 128 else "compute")


def test_ridge_and_attention():
    chip = get_chip("h100-80gb")
    assert roofline.ridge(chip.bf16_flops, chip.bandwidth) == pytest.approx(295, rel=0.001)
    # Llama-3-8B at 2,048 tokens: 4 * 32 * 4096 * 2048 = 1.07 GFLOP, small beside 2 N = 16 GFLOP.
    assert roofline.attention_flops_per_token(32, 32 * 128, 2048) == 1_073_741_824


def test_sliding_layers_read_their_window_only():
    slide = AttentionShape(num_kv_heads=1, k_head_dim=64, v_head_dim=64, window=128)
    full = AttentionShape(num_kv_heads=1, k_head_dim=64, v_head_dim=64)
    assert roofline.kv_bytes_read([slide, full], 1000) == (128 + 1000) * 256
    assert roofline.kv_bytes_read([slide, full], 100) == 200 * 256


def test_a_product_by_hand():
    chip = get_chip("h200-141gb")
    # 4-bit codes and a float16 scale for 128 of them: 8,650,752 bytes; x and y 131,072 and 262,144.
    weight_bytes = 4096 * 4096 / 2 + 2 * 4096 * 32
    step = roofline.product(
        rows=16,
        out=4096,
        width=4096,
        weight_bytes=weight_bytes,
        x_bytes=2,
        y_bytes=4,
        peak_flops=chip.peak_flops("bf16"),
        bandwidth=chip.bandwidth,
    )
    assert step.memory_s == pytest.approx(9_043_968 / 4.8e12)
    assert step.compute_s == pytest.approx(536_870_912 / 989e12)
    assert step.bound == "memory"
