"""Drafters as the command line and files spell them."""

import dataclasses
import enum
import json
from typing import Any

import jax

from infer.errors import ConfigError, RequestError
from infer.spec.drafters import Drafter, NGram, Suffix
from infer.spec.jacobi import Lookahead
from infer.spec.models import SelfDraft

# Those that are options alone: they can be written down.
_KINDS: dict[str, type[Drafter]] = {
    "ngram": NGram,
    "suffix": Suffix,
    "lookahead": Lookahead,
    "self": SelfDraft,
}
KINDS_IN_WORDS = "ngram, suffix, lookahead and self:LAYERS, each with or without :K,"


def is_kind(text: str) -> bool:
    """Return whether the text names a drafter that is options alone, rather than a model."""
    return text.partition(":")[0] in _KINDS


def parse_drafter(text: str) -> Drafter:
    """Return the drafter that "ngram", "suffix:8", "self:8:4" and the like name; the last number is
    k, that of `self` before it its layers.

    Raises:
        ConfigError: there is no such drafter, or a number is none.
        RequestError: a number is out of range.
    """
    name, *sizes = text.split(":")
    if name not in _KINDS:
        raise ConfigError(f"no drafter {text!r}; there are {KINDS_IN_WORDS} drafts a round")
    # Nine digits: int() refuses thousands of them in words of its own.
    if not all(size.isascii() and size.isdecimal() and len(size) <= 9 for size in sizes):
        raise ConfigError(f"draft is {text!r:.80}; after a colon stands a number, as in {name}:8")
    names = ["layers", "k"] if name == "self" else ["k"]
    if len(sizes) > len(names) or (name == "self" and not sizes):
        form = "self:LAYERS or self:LAYERS:K" if name == "self" else f"{name} or {name}:K"
        raise ConfigError(f"draft is {text!r:.80}; it must be {form}")
    options: dict[str, Any] = dict(zip(names, map(int, sizes), strict=False))
    if name == "lookahead" and sizes:
        # An n-gram is longer than no chain of drafts and the token before it.
        options["n"] = max(2, min(Lookahead.n, options["k"] + 1))
    return _KINDS[name](**options)


def as_json(drafter: Drafter) -> str:
    """Return a drafter's name and options as JSON.

    Raises:
        RequestError: it has weights, or is of a kind of the caller's own.
    """
    kind = type(drafter)
    if jax.tree.leaves(drafter) or kind not in _KINDS.values():
        raise RequestError(
            f"a file cannot hold the drafter {kind.__name__}, only those that are options alone "
            f"({', '.join(known.__name__ for known in _KINDS.values())}); keep the state in memory"
        )
    options = {f.name: getattr(drafter, f.name) for f in dataclasses.fields(drafter)}
    plain = {n: v.value if isinstance(v, enum.Enum) else v for n, v in options.items()}
    return json.dumps({"kind": kind.__name__, "options": plain})


def from_json(text: str) -> Drafter:
    """Return the drafter that `as_json` wrote; ValueError or TypeError if it did not."""
    fields = json.loads(text)
    kinds = {kind.__name__: kind for kind in _KINDS.values()}
    if not isinstance(fields, dict) or fields.get("kind") not in kinds:
        raise ValueError(f"no drafter: {text!r:.60}")
    tuples: dict[str, Any] = {
        n: tuple(v) if isinstance(v, list) else v for n, v in fields["options"].items()
    }
    return kinds[fields["kind"]](**tuples)
