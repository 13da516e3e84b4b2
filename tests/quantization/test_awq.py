"""AWQ's searches and SmoothQuant's scale beside rewrites in float64, from the papers' formulas."""

import functools

import jax.numpy as jnp
import numpy as np

from infer.models.params import LayerParams
from infer.quant import rtn
from infer.quant.gptq import gptq, hessian
from infer.quant.methods import AWQ
from infer.quant.qarray import dequantize
from infer.quantization.awq import search_clip, search_scale
from infer.quantization.observe import Seen
from infer.quantization.scaling import smooth_scale
from tests.models.tiny import llama

GROUP = 16


@functools.cache
def residual() -> np.ndarray:
    """64 tokens; a few channels large, as in real models."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((64, 32))
    x[:, [2, 17]] *= 12
    return x.astype(np.float32)


def normed() -> np.ndarray:
    x = residual().astype(np.float64)
    gain = np.asarray(llama().layers[0].mlp_norm, np.float64)
    return x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-5) * gain


def rounded(w: np.ndarray, keep: np.ndarray | float = 1.0) -> np.ndarray:
    """Asymmetric 4-bit groups, scales in float16; `keep` is a share of each group's range."""
    groups = w.reshape(w.shape[0], -1, GROUP)
    low = np.minimum(groups.min(-1), 0) * keep
    high = np.maximum(groups.max(-1), 0) * keep
    s = ((high - low) / 15).astype(np.float16).astype(np.float64)
    z = np.clip(np.round(-low / s), 0, 15)
    q = np.clip(np.round(groups / s[..., None]) + z[..., None], 0, 15)
    return ((q - z[..., None]) * s[..., None]).reshape(w.shape)


def test_the_scale_is_that_of_the_least_error_of_the_blocks_output():
    layer = llama().layers[0]
    assert isinstance(layer, LayerParams)
    h = normed()
    gate, up, down = (np.asarray(w, np.float64) for w in (layer.gate, layer.up, layer.down))

    def block(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        a = h @ gate.T
        return (a / (1 + np.exp(-a)) * (h @ up.T)) @ down.T

    mean = np.abs(h).mean(0)
    losses, candidates = [], []
    for i in range(20):
        s = np.maximum(mean ** (i / 20), 1e-4)
        s = s / np.sqrt(s.max() * s.min())
        error = block(rounded(gate * s) / s, rounded(up * s) / s) - block(gate, up)
        losses.append((error**2).mean())
        candidates.append(s)
    x = jnp.asarray(h, jnp.float32)
    seen = Seen(hessian(x), jnp.abs(x).sum(0), jnp.abs(x).max(0), jnp.float32(64))
    config = llama().config
    got = np.asarray(
        search_scale(
            config,
            config.layers[0],
            1,
            "mlp",
            AWQ(bits=4, group_size=GROUP),
            layer,
            jnp.asarray(residual()),
            None,
            seen,
        )
    )
    np.testing.assert_allclose(got, candidates[int(np.argmin(losses))], rtol=1e-5)
    assert min(losses) < 0.9 * losses[0] and int(np.argmin(losses)) > 0  # ratio 0 is no scaling


def test_the_share_of_a_range_is_that_of_the_least_error_of_the_product():
    rng = np.random.default_rng(1)
    w = rng.standard_t(2, (8, 32)).astype(np.float32)
    x = residual().astype(np.float64)
    shares = 1 - np.arange(10) / 20
    losses = []
    for share in shares:
        error = (rounded(w.astype(np.float64), share) - w).reshape(8, 2, GROUP)
        product = np.einsum("tqg,oqg->toq", x.reshape(64, 2, GROUP), error)
        losses.append((product**2).sum(0))
    method = AWQ(bits=4, group_size=GROUP)
    gram = hessian(jnp.asarray(residual()))
    got = np.asarray(search_clip(method, jnp.asarray(w), gram))
    # Where two shares err alike to float32 either will do: compare what they cost.
    index = np.abs(got[..., None] - shares).argmin(-1)
    chosen = np.take_along_axis(np.stack(losses, -1), index[..., None], -1)[..., 0]
    np.testing.assert_allclose(chosen, np.min(losses, 0), rtol=1e-3)
    assert (got < 1).any()


def test_gptq_under_clipped_scales_keeps_them_and_errs_less():
    method = AWQ(bits=4, group_size=GROUP, rounding="gptq")
    w = jnp.asarray(np.random.default_rng(1).standard_t(2, (8, 32)), jnp.float32)
    gram = hessian(jnp.asarray(residual()))
    format = method.format_for((8, 32))
    clip = search_clip(method, w, gram)
    nearest = rtn.quantize_int(w, format, method.convention, clip)
    packed, ok = gptq(
        w, gram, jnp.float32(0.01), format=format, act_order=True, static_groups=True, clip=clip
    )
    assert bool(ok) and packed.perm is None
    np.testing.assert_array_equal(packed.scale, nearest.scale)
    np.testing.assert_array_equal(packed.zero, nearest.zero)
    errors = [np.asarray(dequantize(q) - w, np.float64) for q in (packed, nearest)]
    mine, theirs = (np.einsum("oi,ij,oj->", e, np.asarray(gram, np.float64), e) for e in errors)
    assert mine < 0.9 * theirs


def test_smoothing_by_hand():
    most = jnp.asarray([16.0, 4.0, 1.0])
    weights = [jnp.asarray([[0.25, -1.0, 0.0]]), jnp.asarray([[0.0, 0.5, -4.0]])]
    # sqrt(16 / 0.25), sqrt(4 / 1), sqrt(1 / 4).
    np.testing.assert_allclose(smooth_scale(most, weights, 0.5), [8, 2, 0.5], rtol=1e-6)
    np.testing.assert_allclose(smooth_scale(most, weights, 1.0), most, rtol=1e-6)
    np.testing.assert_allclose(smooth_scale(most, weights, 0.0), [4, 1, 0.25], rtol=1e-6)


def test_a_dead_channel_has_a_scale():
    got = smooth_scale(jnp.asarray([0.0, 1.0]), [jnp.asarray([[1.0, 0.0]])], 0.5)
    assert np.isfinite(np.asarray(got)).all() and (np.asarray(got) > 0).all()
