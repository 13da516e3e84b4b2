"""The families that this version runs.  A new one is a file beside this and a line here."""

from infer.errors import ConfigError
from infer.models import gemma3, llama
from infer.models.family import Family

FAMILIES = {family.name: family for family in (llama.FAMILY, gemma3.FAMILY)}


def family_of(architecture: str) -> Family:
    """Return the family of a GGUF architecture name; ConfigError lists what there is."""
    if architecture not in FAMILIES:
        raise ConfigError(
            f"architecture {architecture!r} is not supported; this version runs {sorted(FAMILIES)}"
        )
    return FAMILIES[architecture]
