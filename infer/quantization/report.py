"""What quantising did to a model: which matrices stayed as they were, bytes, bits a weight."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from infer.models.params import Params, num_bytes
from infer.quant.formats import PlanarFormat
from infer.quant.qarray import QArray
from infer.quantization.recipe import MATRICES, matrices


@dataclass(frozen=True, kw_only=True)
class Report:
    """Figures of a quantised model.

    Attributes:
        stayed: paths of the matrices that no method took, by what they are ("float32", "Q8_0").
        packed: format -> (matrices, weights, bytes) of those that were taken.
        bytes_before: of all weights as they were.
        bytes_after: of all weights as they are.
        bits_per_weight: of the matrices that were taken, scales included.
        bits_per_weight_overall: of all weights.
        num_weights: of all.
    """

    stayed: dict[str, list[str]]
    packed: dict[str, tuple[int, int, int]]
    bytes_before: int
    bytes_after: int
    bits_per_weight: float
    bits_per_weight_overall: float
    num_weights: int


def widths(params: Params) -> set[int]:
    """Return how many inputs the matrices of the layers have."""
    return {w.shape[1] for path, w in matrices(params).items() if path.startswith("layers.")}


def report(before: Params, after: Params) -> Report:
    """Return what became of `before`."""
    old, new = matrices(before), matrices(after)
    stayed: dict[str, list[str]] = {}
    packed: dict[str, tuple[int, int, int]] = {}
    for path, weight in new.items():
        taken = isinstance(weight, QArray) and isinstance(weight.format, PlanarFormat)
        if not taken or weight is old[path]:
            kind = weight.format.name if isinstance(weight, QArray) else weight.dtype.name
            stayed.setdefault(kind, []).append(path)
            continue
        count, weights, size = packed.get(weight.format.name, (0, 0, 0))
        packed[weight.format.name] = (
            count + 1,
            weights + math.prod(weight.shape),
            size + weight.nbytes,
        )
    in_packed = sum(weights for _, weights, _ in packed.values())
    in_matrices = sum(math.prod(weight.shape) for weight in new.values())
    bytes_after = num_bytes(after)
    vectors = bytes_after - sum(weight.nbytes for weight in new.values())
    num_weights = in_matrices + vectors // after.dtype.itemsize
    return Report(
        stayed=stayed,
        packed=packed,
        bytes_before=num_bytes(before),
        bytes_after=bytes_after,
        bits_per_weight=8 * sum(size for _, _, size in packed.values()) / max(in_packed, 1),
        bits_per_weight_overall=8 * bytes_after / num_weights,
        num_weights=num_weights,
    )


def in_words(paths: Iterable[str], num_layers: int) -> str:
    """Return paths of matrices in few words: `embed, layers.*.down, layers.0-2.q`."""
    layers: dict[str, list[int]] = {}
    words = []
    for path in paths:
        if path.startswith("layers."):
            _, i, name = path.split(".")
            layers.setdefault(name, []).append(int(i))
        else:
            words.append(path)
    spans: dict[str, list[str]] = {}
    for name, found in layers.items():
        spans.setdefault(_ranges(found, num_layers), []).append(name)
    for span, names in spans.items():
        whole = names if len(names) < len(MATRICES) else ["*"]
        inner = whole[0] if len(whole) == 1 else "{" + ",".join(whole) + "}"
        words += [f"layers.{part}.{inner}" for part in span.split(",")]
    return ", ".join(words)


def _ranges(numbers: list[int], total: int) -> str:
    if len(numbers) == total:
        return "*"
    found: list[list[int]] = []
    for n in sorted(numbers):
        if found and n == found[-1][1] + 1:
            found[-1][1] = n
        else:
            found.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in found)
