"""How fast a step can be at best: FLOPs over the peak against bytes over the bandwidth.

A forward pass costs about 2 N FLOPs a token in matrix products (N parameters).  Prefill reads the
weights once for all its tokens and is bound by arithmetic; a decode step reads the weights once
for all its sequences, and every sequence's cache, and is bound by bandwidth until the batch is
large.

Source: Pope et al., Efficiently Scaling Transformer Inference, section 2, arXiv:2211.05102;
Williams et al., Roofline, CACM 52(4), 2009.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from infer.hardware import Chip
from infer.plan.shape import AttentionShape, ModelShape


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Lower bound of one step: the larger of its two times, and what is added on top."""

    compute_s: float
    memory_s: float
    overhead_s: float = 0.0

    @property
    def seconds(self) -> float:
        """max(compute, memory) + overhead."""
        return max(self.compute_s, self.memory_s) + self.overhead_s

    @property
    def bound(self) -> str:
        """What limits the step: "compute" or "memory"."""
        return "compute" if self.compute_s > self.memory_s else "memory"


def attention_flops_per_token(num_layers: int, attention_dim: int, context: int) -> float:
    """Return 4 * L * d * n: the FLOPs of scores and weighted values for one token.

    Args:
        attention_dim: query heads times head width.
        context: tokens attended to.
    """
    return 4.0 * num_layers * attention_dim * context


def ridge(peak_flops: float, bandwidth: float) -> float:
    """Return the FLOPs per byte above which the peak limits, and below which the bandwidth does."""
    return peak_flops / bandwidth


def decode_step(
    *,
    num_params: float,
    weight_bytes: float,
    batch: int,
    kv_bytes_each: float,
    peak_flops: float,
    bandwidth: float,
    overhead_s: float = 0.0,
) -> StepTime:
    """Return the bound of one decode step: max(2 N B / F, (weights + B * KV) / BW) + overhead.

    Args:
        batch: sequences that get one token each.
        kv_bytes_each: cache that one sequence's query reads: context times KV bytes per token.
        peak_flops: FLOP/s; scale it to model a utilisation below 1.
        bandwidth: bytes/s.
    """
    return StepTime(
        compute_s=2.0 * num_params * batch / peak_flops,
        memory_s=(weight_bytes + batch * kv_bytes_each) / bandwidth,
        overhead_s=overhead_s,
    )


def prefill(
    *,
    num_params: float,
    weight_bytes: float,
    num_tokens: int,
    peak_flops: float,
    bandwidth: float,
    overhead_s: float = 0.0,
) -> StepTime:
    """Return the bound of a prefill of `num_tokens`: max(2 N P / F, weights / BW) + overhead."""
    return StepTime(
        compute_s=2.0 * num_params * num_tokens / peak_flops,
        memory_s=weight_bytes / bandwidth,
        overhead_s=overhead_s,
    )


def product(
    *,
    rows: int,
    out: int,
    width: int,
    weight_bytes: float,
    x_bytes: float,
    y_bytes: float,
    peak_flops: float,
    bandwidth: float,
) -> StepTime:
    """Return the bound of x @ w.T: max(2 T O I / F, (weights + T I x + T O y) / BW).

    Args:
        rows: T, of x.
        out: O, outputs.
        width: I, inputs.
        weight_bytes: of the weight as it is packed, scales included.
        x_bytes: bytes of a number of x.
        y_bytes: bytes of a number of the result.
        peak_flops: FLOP/s, or operations/s.
        bandwidth: bytes/s.
    """
    num_bytes = weight_bytes + rows * (width * x_bytes + out * y_bytes)
    return StepTime(compute_s=2.0 * rows * out * width / peak_flops, memory_s=num_bytes / bandwidth)


def kv_bytes_read(layers: Iterable[AttentionShape], context: int) -> float:
    """Return the bytes of cache that one sequence's next token reads; sliding layers: a window."""
    return sum(layer.visible(context) * layer.bytes_per_token for layer in layers)


def decode_step_on(
    model: ModelShape, chip: Chip, *, batch: int = 1, context: int = 0, dtype: str = "bf16"
) -> StepTime:
    """Return the bound of a decode step of `model` on `chip`; `dtype` is that of the arithmetic."""
    return decode_step(
        num_params=model.num_params,
        weight_bytes=model.weight_bytes,
        batch=batch,
        kv_bytes_each=kv_bytes_read(model.layers, context),
        peak_flops=chip.peak_flops(dtype),
        bandwidth=chip.bandwidth,
    )


def prefill_on(model: ModelShape, chip: Chip, num_tokens: int, *, dtype: str = "bf16") -> StepTime:
    """Return the bound of a prefill of `num_tokens` of `model` on `chip`."""
    return prefill(
        num_params=model.num_params,
        weight_bytes=model.weight_bytes,
        num_tokens=num_tokens,
        peak_flops=chip.peak_flops(dtype),
        bandwidth=chip.bandwidth,
    )
