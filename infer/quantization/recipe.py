"""Which method each matrix takes: patterns over paths such as `layers.3.down`."""

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from infer.config import ModelConfig, Residual
from infer.errors import ConfigError
from infer.models.params import Params
from infer.quant.methods import AWQ, Method, SmoothQuant

# Names of a layer's matrices, in the order in which the forward meets them.
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")

# What a bare method stands for: every matrix of every layer.  Embedding and head stay as they are.
_EVERY_LAYER = "layers.*"


@dataclass(frozen=True)
class Recipe:
    """Pairs of a pattern and a method, or None for "leave as it is"; the first that matches holds.

    A path is `embed`, `lm_head` or `layers.<i>.<matrix>`, a matrix one of q, k, v, o, gate, up and
    down; patterns are the shell's (`layers.*`, `layers.0.*`, `layers.*.down`).  What no pattern
    matches stays as it is.
    """

    rules: tuple[tuple[str, Method | None], ...]

    @classmethod
    def of(cls, given: Any) -> "Recipe":
        """Return the recipe of a method, of a mapping pattern -> method, or of a recipe.

        Raises:
            ConfigError: it is none of these.
        """
        if isinstance(given, Recipe):
            return given
        if isinstance(given, Method):
            return cls(((_EVERY_LAYER, given),))
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"a recipe is a {type(given).__name__}; pass a method such as infer.quant.RTN(),"
                " or a mapping of patterns to methods"
            )
        for pattern, method in given.items():
            if not isinstance(pattern, str) or not (method is None or isinstance(method, Method)):
                raise ConfigError(
                    f"{pattern!r}: {method!r} is no rule; a recipe maps patterns such as"
                    " 'layers.*.down' to methods, or to None"
                )
        return cls(tuple(given.items()))

    def method_for(self, path: str) -> Method | None:
        """Return the method of a matrix, None if it stays as it is."""
        for pattern, method in self.rules:
            if fnmatch.fnmatchcase(path, pattern):
                return method
        return None

    def _never_reached(self, paths: Iterable[str]) -> list[str]:
        """Return what is wrong with patterns whose matrices earlier patterns take."""
        left, found = set(paths), []
        for nth, (pattern, _) in enumerate(self.rules):
            mine = set(fnmatch.filter(paths, pattern))
            if mine and not mine & left:
                before = [p for p, _ in self.rules[:nth] if mine & set(fnmatch.filter(paths, p))]
                found.append(
                    f"{pattern!r:.80} is never reached: {', '.join(map(repr, before[:3])):.200}"
                    " before it takes all that it matches, and the first that matches holds; put"
                    " it before, or leave it out"
                )
            left -= mine
        return found

    def methods(self, paths: Mapping[str, tuple[int, int]]) -> dict[str, Method]:
        """Return the methods of matrices by path, those that stay as they are left out.

        Args:
            paths: the shape of each matrix of the model.

        Raises:
            ConfigError: a pattern matches nothing, or only what earlier ones take, or a weight
                cannot have its format; all that is wrong is said at once.
        """
        problems = [
            f"{pattern!r:.80} matches no matrix of this model; there are {_named(paths)}: correct"
            " the pattern, or leave it out"
            for pattern, _ in self.rules
            if not fnmatch.filter(paths, pattern)
        ]
        problems += self._never_reached(paths)
        found: dict[str, Method] = {}
        misfits: dict[str, list[str]] = {}
        for path, shape in paths.items():
            method = self.method_for(path)
            if method is None:
                continue
            found[path] = method
            if path in ("embed", "lm_head") and method.calibrated:
                problems.append(
                    f"{path} cannot take {type(method).__name__}, which is calibrated on a layer's"
                    " inputs; use RTN or a float format for it"
                )
            try:
                method.format_for(shape).row_bytes(shape[1])
            except ValueError as error:
                misfits.setdefault(str(error), []).append(path)
        problems += [
            f"{named[0]}{f' and {len(named) - 1} others' if len(named) > 1 else ''}: {error}"
            for error, named in misfits.items()
        ]
        if not found and not problems:
            problems.append("every matrix stays as it is; give at least one a method")
        if problems:
            more = f" (and {len(problems) - 8} more)" if len(problems) > 8 else ""
            raise ConfigError("; ".join(problems[:8]) + more)
        return found


def _named(paths: Iterable[str]) -> str:
    """Return paths of matrices with the numbers of the layers as a range."""
    layers = {int(path.split(".")[1]) for path in paths if path.startswith("layers.")}
    names = dict.fromkeys(path.split(".")[2] for path in paths if path.startswith("layers."))
    rest = [path for path in paths if not path.startswith("layers.")]
    inner = f"layers.<0 to {max(layers)}>.<{'|'.join(names)}>" if layers else ""
    return ", ".join([*rest, *([inner] if inner else [])])


def matrices(params: Params) -> dict[str, Any]:
    """Return the matrices of a model by their paths, embedding and head first."""
    found = {"embed": params.embed, "lm_head": params.lm_head}
    for i, layer in enumerate(params.layers):
        found |= {f"layers.{i}.{name}": getattr(layer, name) for name in MATRICES}
    return {path: weight for path, weight in found.items() if weight is not None}


def readers(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Return which matrices read the same input, by a name of that input."""
    up = ("gate", "up") if config.gated_mlp else ("up",)
    if config.residual is Residual.PARALLEL_ONE_NORM:
        return {"attn": ("q", "k", "v", *up), "o": ("o",), "down": ("down",)}
    return {"attn": ("q", "k", "v"), "o": ("o",), "mlp": up, "down": ("down",)}


def scaled_inputs(
    config: ModelConfig, methods: Mapping[str, Method], layer: int
) -> dict[str, Method]:
    """Return the inputs of a layer that AWQ or SmoothQuant scales, with the method.

    Raises:
        ConfigError: matrices that read one input would have it scaled differently.
    """
    found = {}
    for name, matrices in readers(config).items():
        asked = [methods.get(f"layers.{layer}.{m}") for m in matrices]
        scaling = [m for m in asked if isinstance(m, (AWQ, SmoothQuant))]
        if not scaling:
            continue
        if len({*asked}) > 1:
            raise ConfigError(
                f"layers.{layer}: {', '.join(matrices)} read one input, which"
                f" {type(scaling[0]).__name__} scales, so they need the same method; the recipe"
                f" gives {', '.join(type(m).__name__ if m else 'None' for m in asked)}"
            )
        found[name] = scaling[0]
    return found
