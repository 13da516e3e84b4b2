"""`--draft`: from what users type to a drafter."""

import dataclasses
from pathlib import Path
from typing import Any

from infer.cli.loading import load_model, use_compilation_cache
from infer.cli.options import DraftRule
from infer.errors import ConfigError
from infer.weights import bundled, hub


def check_draft(text: str | None, rule: DraftRule | None = None) -> None:
    """Refuse a drafter that is none, before anything is loaded.

    Raises:
        ConfigError: it is no kind of drafter, and no model either, or a rule has none.
        RequestError: its number of drafts or layers is out of range.
    """
    if text is None:
        if rule is not None:
            raise ConfigError("--draft-rule says how drafts are judged; give a drafter (--draft)")
        return
    use_compilation_cache()  # before jax is imported
    from infer.spec import by_name
    from infer.spec.drafters import check_k

    if by_name.is_kind(text):
        by_name.parse_drafter(text)
        return
    name, k = _model_and_k(text)
    if k is not None:
        check_k(k)
    known = name in bundled.known_models() or hub.parse(name) is not None
    if not known and not Path(name).expanduser().exists():
        raise ConfigError(
            f"no drafter {text!r:.80}; there are {by_name.KINDS_IN_WORDS} drafts a round, and "
            f"models: a known name ({', '.join(sorted(bundled.known_models()))}), a file, a folder "
            "or a hub id, with :K or without"
        )


def drafter_of(
    text: str,
    target: Any,
    dtype: str | None = None,
    packed: bool | None = None,
    implementation: str | None = None,
    rule: DraftRule | None = None,
) -> Any:
    """Return the drafter that `--draft` names, for a loaded model; a model is loaded as that was.

    Raises:
        ConfigError: it is no kind of drafter, and no model either, or one with which the target
            has no token in common.
    """
    from infer.spec import DraftModel, by_name

    options = {} if rule is None else {"rule": rule.value}
    if by_name.is_kind(text):
        return dataclasses.replace(by_name.parse_drafter(text), **options)
    name, k = _model_and_k(text)
    loaded, _ = load_model(name, dtype, packed, implementation, beside=True)
    return DraftModel.of(loaded, target, **options, **({} if k is None else {"k": k}))


def _model_and_k(text: str) -> tuple[str, int | None]:
    """Return a model's name and the number of drafts that may stand behind it."""
    if Path(text).expanduser().exists():
        return text, None
    name, colon, size = text.rpartition(":")
    # Nine digits: int() refuses thousands of them in words of its own.
    if colon and size.isdecimal() and len(size) <= 9:
        return name, int(size)
    return text, None
