"""Which experts a token goes to, and with which weights.

    scores     softmax(logits)                  "softmax"       Qwen3-MoE, OLMoE, Mixtral
               logits                           "topk_softmax"  gpt-oss; Mixtral, section 2.1
               1 / (1 + exp(-logits))           "sigmoid"       DeepSeek-V3, GLM-4.5
    chosen     the k largest of scores + bias, in the groups kept
    weights    scores of the chosen, for "topk_softmax" their softmax;
               maybe divided by their sum; times scale

Sources: Mixtral arXiv 2401.04088; DeepSeek-V2 arXiv 2405.04434 (groups by their largest score);
DeepSeek-V3 arXiv 2412.19437, section 2.1.2 (bias for choosing alone; groups by the sum of their two
largest).
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int32

_KINDS = ("softmax", "topk_softmax", "sigmoid")


def route(
    logits: Float[Array, "T E"],
    k: int,
    *,
    kind: str,
    normalize: bool = False,
    scale: float = 1.0,
    bias: Float[Array, " E"] | None = None,
    num_groups: int = 1,
    num_kept_groups: int = 1,
) -> tuple[Int32[Array, "T k"], Float[Array, "T k"]]:
    """Return the ids of each token's k experts, best first, and their weights.

    Computed in float32 whatever the logits are.  Of equal scores the lower id is better.  A token
    whose logits have a NaN has NaN weights.

    Args:
        logits: of the router.
        k: experts of a token, 1 to E.
        kind: "softmax", "topk_softmax" or "sigmoid", as above.
        normalize: whether to divide the weights by their sum; "topk_softmax" has the sum 1 already
            and does not take it.
        scale: of the weights, after that.
        bias: added to the scores for choosing, not for weighing.
        num_groups: into which the experts are cut, consecutive ones; a divisor of E.
        num_kept_groups: of them, only whose experts can be chosen: those with the largest score
            (with "sigmoid": with the largest sum of their two largest scores), bias included.

    Raises:
        ValueError: k, kind, bias or the groups are not possible.
    """
    num_experts = logits.shape[1]
    _check(num_experts, k, kind, normalize, bias, num_groups, num_kept_groups)
    x = logits.astype(jnp.float32)
    if kind == "softmax":
        scores = jax.nn.softmax(x, axis=-1)
    elif kind == "sigmoid":
        scores = jax.nn.sigmoid(x)
    else:
        scores = x
    chosen_by = scores if bias is None else scores + bias.astype(jnp.float32)[None, :]
    chosen_by = jnp.where(chosen_by == 0, 0.0, chosen_by)  # -0 is no less than 0
    if num_groups > 1:
        best = 2 if kind == "sigmoid" else 1
        chosen_by = _keep_groups(chosen_by, num_groups, num_kept_groups, best)
    _, ids = lax.top_k(chosen_by, k)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if kind == "topk_softmax":
        weights = jax.nn.softmax(weights, axis=-1)
    if normalize:
        # All scores of a token may be 0 in float32; 1e-20 is DeepSeek-V3's.
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    weights = jnp.where(jnp.any(jnp.isnan(x), axis=-1, keepdims=True), jnp.nan, weights)
    return ids.astype(jnp.int32), weights * scale


def _keep_groups(scores: Array, num_groups: int, num_kept: int, best: int) -> Array:
    """Return the scores, minus infinity in all groups but those kept."""
    grouped_TGE = scores.reshape(scores.shape[0], num_groups, -1)
    of_group_TG = jnp.sum(lax.top_k(grouped_TGE, best)[0], axis=-1)
    _, kept = lax.top_k(of_group_TG, num_kept)
    is_kept_TG = jnp.any(kept[:, :, None] == jnp.arange(num_groups)[None, None, :], axis=1)
    return jnp.where(is_kept_TG[:, :, None], grouped_TGE, -jnp.inf).reshape(scores.shape)


def _check(
    num_experts: int,
    k: int,
    kind: str,
    normalize: bool,
    bias: Array | None,
    num_groups: int,
    num_kept_groups: int,
) -> None:
    if kind not in _KINDS:
        raise ValueError(f"kind is {kind!r}; there are {', '.join(_KINDS)}")
    if kind == "topk_softmax" and normalize:
        raise ValueError(
            "normalize=True with 'topk_softmax', whose weights have the sum 1; leave it out, or use"
            " 'softmax'"
        )
    if bias is not None and bias.shape != (num_experts,):
        raise ValueError(f"bias is {bias.shape}; it must be one for each expert, [{num_experts}]")
    if num_groups < 1 or num_experts % num_groups or not 1 <= num_kept_groups <= num_groups:
        raise ValueError(
            f"{num_kept_groups} of {num_groups} groups of {num_experts} experts; groups must be a"
            " divisor of the experts, and those kept 1 to all"
        )
    in_group = num_experts // num_groups
    if kind == "sigmoid" and num_groups > 1 and in_group < 2:
        raise ValueError(
            f"{num_groups} groups of one expert each; 'sigmoid' takes a group's two best"
        )
    if not 1 <= k <= num_kept_groups * in_group:
        raise ValueError(
            f"k is {k}; there are {num_kept_groups * in_group} experts to choose from"
            f" ({num_kept_groups} of {num_groups} groups of {in_group}), and at least 1 is chosen"
        )
