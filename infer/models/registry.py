"""The families that this version runs.  A new one is a file beside this and a line here."""

from collections.abc import Sequence

from infer.errors import ConfigError
from infer.models import gemma3, llama
from infer.models.checkpoint import Layout
from infer.models.family import Family

FAMILIES = {family.name: family for family in (llama.FAMILY, gemma3.FAMILY)}


def family_of(architecture: str) -> Family:
    """Return the family of a GGUF architecture name; ConfigError lists what there is."""
    if architecture not in FAMILIES:
        raise ConfigError(
            f"architecture {architecture!r} is not supported; this version runs {sorted(FAMILIES)}"
        )
    return FAMILIES[architecture]


def layouts() -> list[Layout]:
    """Return how checkpoints in transformers' layout are read, one layout a family."""
    return [family.hf for family in FAMILIES.values() if family.hf is not None]


def layout_of(architectures: Sequence[str], model_type: str = "") -> Layout:
    """Return the layout of a config.json's `architectures`, or of its `model_type` where it has
    none; ConfigError lists what there is.
    """
    for layout in layouts():
        if set(architectures) & set(layout.architectures):
            return layout
        if not architectures and model_type in layout.model_types:
            return layout
    known = sorted(name for layout in layouts() for name in layout.architectures)
    raise ConfigError(
        f"architecture {', '.join(architectures)[:200] or model_type[:200] or 'none'!r} is not"
        f" supported; this version runs {', '.join(known)}"
    )
