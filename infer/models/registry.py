"""The families that this version runs.  A new one is a file beside this and a line here."""

from collections.abc import Sequence

from infer.errors import ConfigError
from infer.models import (
    cohere2,
    gemma,
    gemma3,
    glm4,
    gpt2,
    gpt_neox,
    granite,
    llama,
    mistral,
    olmo2,
    phi3,
    qwen,
    smollm3,
    starcoder2,
)
from infer.models.checkpoint import Layout
from infer.models.family import Family

_ALL = (
    llama.FAMILY,
    mistral.MISTRAL,
    mistral.MINISTRAL,
    qwen.QWEN2,
    qwen.QWEN3,
    gemma.GEMMA,
    gemma.GEMMA2,
    gemma3.FAMILY,
    phi3.FAMILY,
    smollm3.FAMILY,
    olmo2.FAMILY,
    granite.FAMILY,
    starcoder2.FAMILY,
    glm4.FAMILY,
    cohere2.FAMILY,
    gpt2.FAMILY,
    gpt_neox.FAMILY,
)
FAMILIES = {family.name: family for family in _ALL}


def family_of(architecture: str) -> Family:
    """Return the family of a GGUF architecture name; ConfigError lists what there is."""
    known = {name: family for name, family in FAMILIES.items() if family.config is not None}
    if architecture not in known:
        raise ConfigError(
            f"architecture {architecture!r} is not supported; this version runs {sorted(known)}"
        )
    return known[architecture]


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
