"""Rotations that leave what a model computes as it is, and its outliers spread over all channels.

    R1   x' = R x       the residual stream: what writes it is turned, what reads it turned back
    R2   v' = R v       values of each head, turned back by the output projection

Before R1 the norms' gains are folded into the matrices that follow, and the head gets weights of
its own.  Both are folded in float64; nothing is left to do when the model runs.  (R3, of keys and
queries after rotary embedding, is `kv_dtype="int4_hadamard"`; R4, before the last matrix of the
feed-forward, is `hadamard="full"` of its method, see `turning_down`.)

Source: QuaRot (arXiv 2404.00456); SpinQuant (arXiv 2405.16406) has the names.
"""

import dataclasses
import fnmatch
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from infer.config import ModelConfig, Norm
from infer.errors import ConfigError
from infer.models.params import LayerParams, Params
from infer.native.repack import Packed
from infer.pytree import Leaf, pytree_dataclass
from infer.quant.formats import PlanarFormat
from infer.quant.methods import AWQ, Method
from infer.quant.paley import hadamard
from infer.quant.qarray import QArray, dequantize
from infer.quantization.recipe import MATRICES, Recipe, readers

# Rows of a table that are turned at a time, in float64.
_ROWS = 8192


@pytree_dataclass
class Rotations:
    """Orthonormal matrices; None leaves that as it is."""

    residual: Leaf = None  # float [D, D]
    values: Leaf = None  # float [L, H, H]


def hadamard_rotations(
    config: ModelConfig, seed: int = 0, *, residual: bool = True, values: bool = True
) -> Rotations:
    """Return QuaRot's rotations: Hadamard matrices, their columns with random signs.

    Args:
        config: of the model.
        seed: of the signs.
        residual: whether the residual stream is turned (R1).
        values: whether the values of each head are (R2).

    Raises:
        ConfigError: the model cannot have them, or there is no Hadamard matrix of that size.
    """
    rng = np.random.default_rng(seed)
    signs = lambda *shape: rng.choice([-1.0, 1.0], shape)

    def matrix(size: int, what: str) -> np.ndarray:
        try:
            return hadamard(size)
        except ValueError as error:
            raise ConfigError(f"{what}: {error}") from None

    r1 = r2 = None
    if residual:
        size = config.hidden_size
        r1 = matrix(size, "the residual stream") * signs(size)
    if values:
        size = config.head_dim
        r2 = matrix(size, "values of a head") * signs(config.num_layers, 1, size)
    return checked(config, Rotations(r1, r2))


def checked(config: ModelConfig, rotations: Rotations) -> Rotations:
    """Return the rotations, as float64 on the host.

    Raises:
        ConfigError: a matrix is of another size or not orthonormal, or the model has something that
            does not commute with R1.
    """
    shapes = {
        "residual": (config.hidden_size,) * 2,
        "values": (config.num_layers, config.head_dim, config.head_dim),
    }
    found: dict[str, np.ndarray | None] = {}
    for name, shape in shapes.items():
        given = getattr(rotations, name)
        found[name] = None if given is None else np.asarray(given, np.float64)
        if (r := found[name]) is None:
            continue
        if r.shape != shape:
            raise ConfigError(
                f"rotations.{name} is {list(r.shape)}, and this {config.family} model takes"
                f" {list(shape)}; make them for this model"
            )
        off = np.abs(r @ r.swapaxes(-1, -2) - np.eye(shape[-1])).max()
        if not off < 1e-4:
            raise ConfigError(
                f"rotations.{name} is {off:.2g} from orthonormal, which would change the model;"
                " pass matrices whose product with their transpose is the identity"
            )
    if found["residual"] is not None and (why := refusal(config)):
        raise ConfigError(
            f"the residual stream of this {config.family} model cannot be turned: {why}; turn"
            ' values (R2: residual=False, or --rotation values), `down` (hadamard="full") and'
            ' cached keys (kv_dtype="int4_hadamard")'
        )
    return Rotations(found["residual"], found["values"])


def refusal(config: ModelConfig) -> str:
    """Return why the residual stream cannot be turned, "" if it can."""
    if config.norm is not Norm.RMS:
        return "layer norm subtracts the mean over channels, which turning mixes"
    if config.post_norms:
        return "norms after its blocks have a gain for each channel, which cannot be folded"
    if not config.pre_norms:
        return "no norms before its blocks"
    return ""


def rotate(params: Params, rotations: Rotations) -> Params:
    """Return weights that compute the same, turned; all matrices of layers become floats.

    Args:
        params: weights, floats or GGUF blocks.
        rotations: of this model.

    Raises:
        ConfigError: see `checked`; weights that were rounded already, or that are packed for native
            operations.
    """
    rotations = checked(params.config, rotations)
    new = rotated_ends(params, rotations)
    layers = tuple(
        rotated_layer(params.config, rotations, i, floats(w, f"layers.{i}"))
        for i, w in enumerate(params.layers)
    )
    return dataclasses.replace(new, layers=layers)


def floats(w: LayerParams, path: str) -> LayerParams:
    """Return the layer with its matrices as float32."""
    there = {m: getattr(w, m) for m in MATRICES if getattr(w, m) is not None}
    return dataclasses.replace(w, **{m: _float(v, f"{path}.{m}") for m, v in there.items()})


def _float(w: Any, path: str) -> Array:
    if isinstance(w, Packed):
        raise ConfigError(
            f"{path} is packed for the CPU's native operations, in an order that is not decoded;"
            " load the model with packed='blocks' (GGUF) or packed=False"
        )
    if isinstance(w, QArray) and isinstance(w.format, PlanarFormat):
        raise ConfigError(
            f"{path} is {w.format.name} already, and turning it would round it again; take the"
            " model that was quantised"
        )
    return dequantize(w) if isinstance(w, QArray) else jnp.asarray(w, jnp.float32)


def rotated_ends(params: Params, rotations: Rotations) -> Params:
    """Return `params` with embedding, head and final norm of the turned model; its layers as they
    are.  Arguments as in `rotate`, the rotations `checked`.
    """
    r = rotations.residual
    if r is None:
        return params
    dtype = params.dtype
    head = params.embed if params.lm_head is None else params.lm_head
    ones = jnp.ones_like(params.final_norm)
    gain = np.asarray(params.final_norm, np.float64)
    positions = params.positions
    return dataclasses.replace(
        params,
        embed=_table(params.embed, r, None, dtype, "embed"),
        lm_head=_table(head, r, gain, dtype, "lm_head"),
        final_norm=ones,
        positions=None if positions is None else _table(positions, r, None, dtype, "positions"),
        config=dataclasses.replace(params.config, tied_embeddings=False),
    )


def _table(w: Any, r: np.ndarray, gain: np.ndarray | None, dtype: Any, path: str) -> Array:
    """Return (w * gain) r^T of a table [V, D], some rows at a time."""
    w = np.asarray(_float(w, path))
    parts = [w[i : i + _ROWS].astype(np.float64) for i in range(0, len(w), _ROWS)]
    turned = [((p if gain is None else p * gain) @ r.T).astype(np.float32) for p in parts]
    return jnp.asarray(np.concatenate(turned)).astype(dtype)


def rotated_layer(
    config: ModelConfig, rotations: Rotations, index: int, w: LayerParams
) -> LayerParams:
    """Return a layer of float matrices turned, float32; the rotations are `checked`."""
    change = {
        name: np.asarray(value, np.float64)
        for name in (*MATRICES, "v_bias", "o_bias", "down_bias")
        if (value := getattr(w, name)) is not None
    }
    r1, r2 = rotations.residual, rotations.values
    if r2 is not None:
        change |= turn_values(np, change, r2[index])
    kept: dict[str, Any] = {}
    if r1 is not None:
        gains = {norm: np.asarray(getattr(w, norm), np.float64) for norm in _norms(config)}
        change |= turn_residual(config, change, gains, r1)
        kept = {norm: jnp.ones_like(getattr(w, norm)) for norm in gains}
    for name, value in change.items():
        dtype = jnp.float32 if name in MATRICES else getattr(w, name).dtype
        kept[name] = jnp.asarray(value.astype(np.float32)).astype(dtype)
    return dataclasses.replace(w, **kept)


def turn_residual(
    config: ModelConfig, w: Mapping[str, Any], gains: Mapping[str, Any], r: Any
) -> dict[str, Any]:
    """Return what R1 changes of a layer's matrices and biases, gains folded; NumPy or JAX."""
    new = {}
    for norm, matrices in _norms(config).items():
        new |= {m: (w[m] * gains[norm][None, :]) @ r.T for m in matrices}
    for writer in ("o", "down"):
        new[writer] = r @ w[writer]
        if f"{writer}_bias" in w:
            new[f"{writer}_bias"] = r @ w[f"{writer}_bias"]
    return new


def turn_values(xp: Any, w: Mapping[str, Any], r: Any) -> dict[str, Any]:
    """Return what R2 changes of a layer's matrices and biases; `xp` is NumPy or jax.numpy."""
    size = r.shape[0]
    heads = w["v"].reshape(-1, size, w["v"].shape[1])
    o = w["o"].reshape(w["o"].shape[0], -1, size)
    new = {
        "v": xp.einsum("ij,kjd->kid", r, heads).reshape(w["v"].shape),
        "o": xp.einsum("ij,dnj->dni", r, o).reshape(w["o"].shape),
    }
    if "v_bias" in w:
        new["v_bias"] = xp.einsum("ij,kj->ki", r, w["v_bias"].reshape(-1, size)).reshape(-1)
    return new


def _norms(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Return the matrices that read each norm of a layer."""
    read = readers(config)
    return {"attn_norm": read["attn"]} | ({"mlp_norm": read["mlp"]} if "mlp" in read else {})


def turning_down(
    config: ModelConfig, method: Method | Mapping[str, Method | None] | Recipe
) -> Recipe:
    """Return a recipe that is `method`, and turns the inputs of `down` by a Hadamard matrix (R4).

    Args:
        config: of the model.
        method: as of `infer.quantize`.

    Raises:
        ConfigError: `down` has a method that cannot turn its inputs.
    """
    recipe = Recipe.of(method)
    wide: dict[str, Method] = {}
    for i in range(config.num_layers):
        each = recipe.method_for(f"layers.{i}.down")
        if each is None:
            continue
        if not hasattr(each, "hadamard") or isinstance(each, AWQ):
            raise ConfigError(
                f"{type(each).__name__} cannot turn the inputs of down (R4); use RTN, GPTQ, MX or"
                " NVFP4, or leave R4 out"
            )
        turned = "full" if each.hadamard is None else each.hadamard  # type: ignore[attr-defined]
        wide[f"layers.{i}.down"] = dataclasses.replace(each, hadamard=turned)  # type: ignore[type-var]
    if len(wide) == config.num_layers and len({*wide.values()}) == 1:
        wide = {"layers.*.down": next(iter(wide.values()))}
    # What now matches no other matrix would never be reached.
    others = [m for m in MATRICES if m != "down"]
    paths = [f"layers.{i}.{m}" for i in range(config.num_layers) for m in others]
    paths += ["embed", "lm_head", *(f"layers.{i}.down" for i in range(config.num_layers))]
    left = [p for p in paths if not any(fnmatch.fnmatchcase(p, rule) for rule in wide)]
    rest = [rule for rule in recipe.rules if fnmatch.filter(left, rule[0])]
    return Recipe((*wide.items(), *rest))
