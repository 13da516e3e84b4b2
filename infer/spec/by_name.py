"""Drafters as the command line and files spell them."""

import dataclasses
import enum
import json

import jax

from infer.errors import ConfigError, RequestError
from infer.spec.drafters import Drafter, NGram, Suffix
from infer.spec.jacobi import Lookahead

# Those that are options alone: they can be written down.
_KINDS: dict[str, type[Drafter]] = {
    "ngram": NGram,
    "suffix": Suffix,
    "lookahead": Lookahead,
}


def parse_drafter(text: str) -> Drafter:
    """Return the drafter that "ngram", "suffix:8" and the like name; the number is k.

    Raises:
        ConfigError: there is no such drafter, or k is no number.
        RequestError: k is out of range.
    """
    name, colon, size = text.partition(":")
    if name not in _KINDS:
        known = ", ".join(f"{kind} or {kind}:K" for kind in _KINDS)
        raise ConfigError(f"no drafter {text!r}; there are {known}, K drafts a round")
    if not colon:
        return _KINDS[name]()
    if not size.isdecimal():
        raise ConfigError(f"draft is {text!r}; after the colon stands a number of drafts: {name}:8")
    return _KINDS[name](k=int(size))


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
    tuples = {n: tuple(v) if isinstance(v, list) else v for n, v in fields["options"].items()}
    return kinds[fields["kind"]](**tuples)
