"""`quantize`: layer by layer, so that floats of one layer are there beside the model.

The calibration text runs through the layers that are already quantised, so that each layer makes up
for the errors of those before it.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from infer.config import LayerConfig, ModelConfig
from infer.errors import ConfigError
from infer.models import decoder
from infer.models.params import LayerParams, Params
from infer.native.repack import Packed
from infer.quant import codes, rtn
from infer.quant.formats import PlanarFormat
from infer.quant.gptq import gptq
from infer.quant.hadamard import transform
from infer.quant.methods import AWQ, GPTQ, RTN, Method, SmoothQuant
from infer.quant.qarray import QArray, dequantize, scales
from infer.quantization import awq, rotation, scaling
from infer.quantization.observe import Seen, observe_all, run
from infer.quantization.recipe import MATRICES, Recipe, matrices, readers, scaled_inputs
from infer.quantization.rotation import Rotations

logger = logging.getLogger(__name__)

# Tokens that run through a layer at a time, and that AWQ's search reads.
_BATCH_TOKENS = 2048
# Tenfold from the method's damping, where the Hessian cannot be factorised.
_DAMPINGS = (1.0, 10.0, 100.0)


def quantize(
    params: Params,
    method: Method | Mapping[str, Method | None] | Recipe,
    calibration: Any = None,
    *,
    rotations: Rotations | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Params:
    """Return `params` with matrices quantised; nothing of `params` changes.

    Deterministic: equal arguments give equal bytes.  Matrices that are packed already (QArray) are
    decoded a layer at a time.

    Args:
        params: weights.
        method: for all matrices of all layers, or a recipe of patterns (`Recipe`).
        calibration: token ids [N, S], sequences of text that is like what the model will be used
            for; needed by GPTQ, AWQ and SmoothQuant.
        rotations: turn the model before it is rounded, see `infer.quantization.rotation`; what has
            no method is turned as well, and floats.
        progress: called with (layers done, layers in all).

    Raises:
        ConfigError: a pattern that matches nothing, a group that does not divide a weight, weights
            that are not finite or cannot be decoded, too little calibration text, a Hessian that
            stays singular, rotations that this model cannot have.
    """
    if not isinstance(params, Params):
        raise ConfigError(f"params is a {type(params).__name__}; pass model.params")
    _check_decodable(params)
    if rotations is not None:
        rotations = rotation.checked(params.config, rotations)
        params = rotation.rotated_ends(params, rotations)
    config = params.config
    methods = Recipe.of(method).methods(_shapes(params))
    calibrated = any(m.calibrated for m in methods.values())
    scaled = [scaled_inputs(config, methods, i) for i in range(config.num_layers)]
    for i, weights in enumerate(params.layers):
        _check_writers(config, methods, weights, scaled[i], i)
    xs, length, turns = [], 1, {}
    if calibrated:
        tokens = _checked_tokens(params, calibration, methods)
        xs, length, turns = _embedded(params, tokens)
    elif calibration is not None:
        raise ConfigError(
            "calibration is given, and no method of this recipe looks at activations; leave it out"
        )
    if any(isinstance(m, SmoothQuant) for m in methods.values()) and not config.pre_norms:
        logger.warning(
            "SmoothQuant moves nothing: this %s model has no norms before its blocks to take the"
            " scales; its matrices are rounded, and its activations, as without",
            config.family,
        )
    last = max((i for i in range(config.num_layers) if _looks(methods, i)), default=-1)
    layers = []
    for i, (layer, weights) in enumerate(zip(config.layers, params.layers, strict=True)):
        mine = {m: methods[f"layers.{i}.{m}"] for m in MATRICES if f"layers.{i}.{m}" in methods}
        if rotations is not None:
            weights = _rotated(config, rotations, i, weights, params.dtype, mine)
        if mine:
            turn = turns.get(layer.rope)
            floats = _floats(weights, f"layers.{i}", mine)
            new = _quantize_layer(config, layer, length, i, floats, mine, scaled[i], xs, turn)
            # What has no method keeps its form, unless a scale was folded into it.
            kept = {
                m: getattr(weights, m)
                for m in MATRICES
                if m not in mine and getattr(new, m) is getattr(floats, m)
            }
            weights = dataclasses.replace(new, **kept)
        if i < last:
            for n, x in enumerate(xs):  # one after the other, so that no two sets of them are there
                xs[n] = run(config, layer, length, weights, x, turns.get(layer.rope))
                xs[n].block_until_ready()
        else:
            xs = []
        layers.append(weights)
        if progress is not None:
            progress(i + 1, config.num_layers)
    outer = {
        name: _pack(methods[name], name, _float(name, getattr(params, name)))
        for name in ("embed", "lm_head")
        if name in methods
    }
    return dataclasses.replace(params, layers=tuple(layers), **outer)


# ---- What is asked ------------------------------------------------------------------------------


def _looks(methods: Mapping[str, Method], layer: int) -> bool:
    """Return whether a method of this layer looks at activations."""
    return any(m.calibrated for p, m in methods.items() if p.startswith(f"layers.{layer}."))


def _shapes(params: Params) -> dict[str, tuple[int, int]]:
    return {path: (w.shape[0], w.shape[1]) for path, w in matrices(params).items()}


def _check_writers(
    config: ModelConfig,
    methods: Mapping[str, Method],
    w: LayerParams,
    scaled: Mapping[str, Method],
    layer: int,
) -> None:
    """Refuse to make floats of a packed matrix that nobody asked to touch: AWQ divides the rows of
    what writes the inputs that it scales.
    """
    for name, method in scaled.items():
        writer = {"o": "v", "down": "up"}.get(name)
        if writer is None or not isinstance(method, AWQ) or not scaling.can_scale(config, name):
            continue
        path, weight = f"layers.{layer}.{writer}", getattr(w, writer)
        if path not in methods and isinstance(weight, QArray):
            raise ConfigError(
                f"layers.{layer}.{name}: AWQ scales its inputs, which divides the rows of {path},"
                f" and that is packed ({weight.format.name}) and has no method, so it would become"
                " floats; give it a method, or another to this one"
            )


def _check_decodable(params: Params) -> None:
    # Inside a trace what is made is traced, even where the weights are not.
    if any(isinstance(x, Tracer) for x in (*jax.tree.leaves(params), jnp.zeros(()))):
        raise ConfigError(
            "infer.quantize was called inside a function that JAX traces (jit, vmap, grad), and it"
            " looks at weights to check them; call it outside and pass what it returns"
        )
    if any(isinstance(w, Packed) for w in matrices(params).values()):
        raise ConfigError(
            "the weights are packed for the CPU's native operations, in an order that is not"
            " decoded; load the model with packed='blocks' (GGUF) or packed=False"
        )


def _checked_tokens(params: Params, calibration: Any, methods: Mapping[str, Method]) -> np.ndarray:
    names = sorted({type(m).__name__ for m in methods.values() if m.calibrated})
    if calibration is None:
        raise ConfigError(
            f"{' and '.join(names)} needs activations; pass calibration=token ids [N, S], for"
            " example 64 sequences of 512 tokens of text like that of your use"
        )
    try:
        tokens = np.asarray(calibration)
    except ValueError:
        raise ConfigError("calibration is ragged; pass sequences of equal length [N, S]") from None
    if tokens.ndim != 2 or 0 in tokens.shape or not np.issubdtype(tokens.dtype, np.integer):
        raise ConfigError(
            f"calibration is {tokens.dtype}{list(tokens.shape)}; pass integer token ids [N, S]"
        )
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= params.config.num_tokens:
        raise ConfigError(
            f"calibration has ids from {low} to {high}; the model knows 0 to"
            f" {params.config.num_tokens - 1}: was it encoded with another tokenizer?"
        )
    if tokens.shape[1] > params.config.max_context:
        raise ConfigError(
            f"calibration has sequences of {tokens.shape[1]} tokens, and the model's context is"
            f" {params.config.max_context}; cut them"
        )
    shapes = _shapes(params)
    widest = max(
        (shapes[path][1] for path, m in methods.items() if _factorises(m)),
        default=64,
    )
    if tokens.size < widest:
        raise ConfigError(
            f"calibration has {tokens.size} tokens, and inputs of {widest} channels need at least"
            f" as many (128 sequences of 512 are usual); give more text"
        )
    return tokens


def _factorises(method: Method) -> bool:
    """Return whether the codes are found by GPTQ, which needs a Hessian of full rank."""
    inner = method.weights if isinstance(method, SmoothQuant) else method
    return isinstance(inner, GPTQ) or (isinstance(inner, AWQ) and inner.rounding == "gptq")


def _embedded(params: Params, tokens: np.ndarray) -> tuple[list[Array], int, dict[Any, Any]]:
    """Return the embedded sequences in batches [T, D], their length, and rotations by kind.

    Batches have as many sequences as others, or one less: two compiled shapes at most.
    """
    length = tokens.shape[1]
    most = max(1, min(len(tokens), _BATCH_TOKENS // length))
    count = -(-len(tokens) // most)
    batch = -(-len(tokens) // count)
    positions = jnp.tile(jnp.arange(length, dtype=jnp.int32), batch)
    spans = jnp.full(positions.shape, length, jnp.int32)
    embed = jax.jit(decoder.embed_tokens)
    # A batch is spread over the whole text: AWQ's search reads the first one only.
    xs = [
        embed(params, jnp.asarray(part.reshape(-1), jnp.int32), positions[: part.size])
        for part in (tokens[nth::count] for nth in range(count))
    ]
    return xs, length, decoder.rope_tables(params.config, positions, spans)


def _float(path: str, weight: Any) -> Array:
    """Return a matrix as float32; NaN and infinity are refused."""
    if isinstance(weight, QArray) and isinstance(weight.format, PlanarFormat):
        raise ConfigError(
            f"{path} is {weight.format.name} already, and rounding it again only adds errors; take"
            " the model that was quantised, or leave this weight out in a recipe"
        )
    w = dequantize(weight) if isinstance(weight, QArray) else jnp.asarray(weight, jnp.float32)
    if not bool(jnp.isfinite(w).all()):
        raise ConfigError(
            f"{path} has weights that are NaN or infinite, and no scale fits them; the file is"
            " damaged, or its dtype too small for it"
        )
    return w


def _floats(weights: LayerParams, path: str, methods: Mapping[str, Method]) -> LayerParams:
    """Return the layer with its matrices as float32."""
    of = lambda name: (
        _float(f"{path}.{name}", getattr(weights, name))
        if name in methods
        else dequantize(w)
        if isinstance(w := getattr(weights, name), QArray)
        else w
    )
    there = [name for name in MATRICES if getattr(weights, name) is not None]
    return dataclasses.replace(weights, **{name: of(name) for name in there})


def _rotated(
    config: ModelConfig,
    rotations: Rotations,
    index: int,
    weights: LayerParams,
    dtype: jnp.dtype,
    methods: Mapping[str, Method],
) -> LayerParams:
    """Return a layer turned; what has no method in the dtype that it will be kept in."""
    path = f"layers.{index}"
    w = rotation.rotated_layer(config, rotations, index, rotation.floats(weights, path))
    stay = [m for m in MATRICES if m not in methods and getattr(w, m) is not None]
    return dataclasses.replace(w, **{m: getattr(w, m).astype(dtype) for m in stay})


# ---- A layer ------------------------------------------------------------------------------------


def _quantize_layer(
    config: ModelConfig,
    layer: LayerConfig,
    length: int,
    index: int,
    w: LayerParams,
    methods: Mapping[str, Method],
    scaled: Mapping[str, Method],
    xs: Sequence[Array],
    turn: Any,
) -> LayerParams:
    """Return the layer with its matrices packed."""
    seen: dict[str, Seen] = {}
    if any(m.calibrated for m in methods.values()):
        seen = dict(observe_all(config, layer, length, w, list(xs), turn))
        _check_seen(index, seen)
        for name, method in scaled.items():
            if scaling.can_scale(config, name):
                batch = xs[0].shape[0] // length
                s = _scale(config, layer, batch, name, method, w, xs[0], turn, seen[name])
                if s is not None:
                    w = scaling.scale_input(config, w, name, s)
                    seen[name] = seen[name].divided(s)
    packed = {}
    for name, read in readers(config).items():
        for m in read:
            if m in methods:
                path = f"layers.{index}.{m}"
                packed[m] = _round(methods[m], path, m, getattr(w, m), seen.get(name))
    return dataclasses.replace(w, **packed)


def _check_seen(index: int, seen: Mapping[str, Seen]) -> None:
    """Refuse activations that overflow: the searches would choose nothing, and say nothing."""
    for name, each in seen.items():
        if not bool(jnp.isfinite(each.gram).all()):
            raise ConfigError(
                f"layers.{index}: the activations that {name} reads from the calibration text are"
                " NaN or infinite, or their squares are; load the model in float32, or look for"
                " broken weights in this layer and before it"
            )


def _scale(
    config: ModelConfig,
    layer: LayerConfig,
    batch: int,
    name: str,
    method: Method,
    w: LayerParams,
    x: Array,
    turn: Any,
    seen: Seen,
) -> Array | None:
    """Return the scale of an input, None if it stays as it is."""
    if isinstance(method, SmoothQuant):
        if name not in ("attn", "mlp"):
            return None
        weights = [getattr(w, m) for m in readers(config)[name]]
        return scaling.smooth_scale(seen.most, weights, method.alpha)
    assert isinstance(method, AWQ)
    return awq.search_scale(config, layer, batch, name, method, w, x, turn, seen)


def _round(method: Method, path: str, matrix: str, w: Array, seen: Seen | None) -> QArray:
    """Return one matrix packed by its method."""
    if isinstance(method, SmoothQuant):
        assert seen is not None
        inner = _round(method.weights, path, matrix, w, seen)
        act = jnp.maximum(seen.most.max(), 1e-5) / 127 if method.static else None
        format = method.format_for((w.shape[0], w.shape[1]))
        if inner.perm is not None:
            format = dataclasses.replace(format, name=f"{format.name}-ORDERED", ordered=True)
        return dataclasses.replace(inner, act_scale=act, format=format)
    if isinstance(method, GPTQ):
        assert seen is not None
        return _gptq(method, path, w, seen)
    if isinstance(method, AWQ):
        assert seen is not None
        clip = jnp.float32(1)
        if method.clip and matrix not in ("q", "k"):
            clip = awq.search_clip(method, w, seen.gram)
        if method.rounding == "gptq":
            return _gptq(method, path, w, seen, clip)
        return _checked(path, _pack_int(method, w, clip))
    return _pack(method, path, w)


def _gptq(method: GPTQ | AWQ, path: str, w: Array, seen: Seen, clip: Array | float = 1.0) -> QArray:
    """Return one matrix with codes by GPTQ; those of AWQ under the scales of its search."""
    gram = seen.gram * (2 / seen.count)
    format = method.format_for((w.shape[0], w.shape[1]))
    if format.rotated:
        w, gram = _turned(w, gram, format.rotated)
    ours = isinstance(method, AWQ)
    for factor in _DAMPINGS:
        packed, ok = gptq(
            w,
            gram,
            jnp.float32(method.damping * factor),
            format=format,
            convention=method.convention,
            act_order=ours or method.act_order,
            static_groups=ours or method.static_groups,
            clip=clip,
        )
        if bool(ok):
            return _checked(path, packed)
        logger.warning(
            "%s: the Hessian with damping %g has no factor; trying ten times as much",
            path,
            method.damping * factor,
        )
    raise ConfigError(
        f"{path}: the Hessian stays singular with damping {method.damping * _DAMPINGS[-1]:g}; give"
        " more, or more varied, calibration text, or a larger damping"
    )


@functools.partial(jax.jit, static_argnames=("size",))
def _turned(w: Array, gram: Array, size: int) -> tuple[Array, Array]:
    """Return a weight and the sum of x x^T for turned inputs."""
    return transform(w, size), transform(transform(gram, size).T, size)


@functools.partial(jax.jit, static_argnames=("method",))
def _pack_int(method: RTN, w: Array, clip: Array) -> QArray:
    return rtn.quantize_int(w, method.format_for((w.shape[0], w.shape[1])), method.convention, clip)


@functools.partial(jax.jit, static_argnames=("method",))
def _packed(method: Method, w: Array) -> QArray:
    return method.pack(w)


def _pack(method: Method, path: str, w: Array) -> QArray:
    return _checked(path, _packed(method, w))


@jax.jit
def _in_range(packed: QArray) -> tuple[Array, Array]:
    """Return whether the stored scales are finite, and whether the largest codes are under them."""
    format = packed.format
    assert isinstance(format, PlanarFormat)
    stored = packed.scale.offset if format.scale_dtype == "nested" else packed.scale
    if format.code != "int":
        largest = codes.LARGEST[format.code]
    else:
        largest = float((1 << (format.bits - 1)) if format.symmetric else (1 << format.bits) - 1)
    in_range = jnp.isfinite(scales(packed) * jnp.float32(largest)).all()
    return jnp.isfinite(stored.astype(jnp.float32)).all(), in_range


def _checked(path: str, packed: QArray) -> QArray:
    """Refuse scales that their dtype cannot hold, and numbers that float32 cannot."""
    assert isinstance(packed.format, PlanarFormat)
    fits, in_range = map(bool, _in_range(packed))
    dtype = packed.format.scale_dtype
    if not fits and dtype in ("float16", "bfloat16"):
        raise ConfigError(f"{path}: its scales are beyond {dtype}; use scale_dtype='float32'")
    if not (fits and in_range):
        raise ConfigError(
            f"{path}: its weights are so large that numbers of {packed.format.name} would be beyond"
            " float32; leave it out in a recipe, or look whether the file is damaged"
        )
    return packed
