"""The families that this version runs.  A new one is a file beside this and a line here."""

from infer.errors import ConfigError
from infer.models import (
    cohere2,
    gemma,
    gemma3,
    glm4,
    gpt2,
    granite,
    llama,
    mistral,
    olmo2,
    phi3,
    qwen,
    smollm3,
    starcoder2,
)
from infer.models.family import Family

_ALL = (
    llama.FAMILY,
    mistral.FAMILY,
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
)
FAMILIES = {family.name: family for family in _ALL}
_GGUF = {family.name: family for family in _ALL if family.gguf is not None}
_HF = {model_type: family for family in _ALL for model_type in family.model_types}


def family_of(architecture: str) -> Family:
    """Return the family of a GGUF architecture name; ConfigError lists what there is."""
    return _known(architecture, _GGUF, "architecture")


def family_of_hf(model_type: str) -> Family:
    """Return the family of a `model_type` of transformers; ConfigError lists what there is."""
    return _known(model_type, _HF, "model type")


def _known(name: str, families: dict[str, Family], what: str) -> Family:
    if name not in families:
        raise ConfigError(f"{what} {name!r} is not supported; this version runs {sorted(families)}")
    return families[name]
