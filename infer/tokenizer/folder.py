"""A tokenizer from the files of a folder in transformers' layout.

tokenizer.json has the vocabulary; tokenizer_config.json and special_tokens_map.json name special
tokens; config.json and generation_config.json add ids that end a generation; chat templates are
files of their own or stand in tokenizer_config.json.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from infer.errors import WeightFormatError
from infer.model_files import MAX_JSON_BYTES, ModelFolder
from infer.tokenizer.library import LibraryCodec, vocabulary_of
from infer.tokenizer.vocabulary import Vocabulary, end_ids

_TEMPLATES = "additional_chat_templates"


@dataclass(frozen=True)
class Parts:
    """What a tokenizer is made of."""

    vocabulary: Vocabulary
    codec: LibraryCodec
    prefix: tuple[int, ...] = ()
    templates: Mapping[str, str] = field(default_factory=dict)


def parts_of_folder(folder: ModelFolder) -> Parts:
    """Read the tokenizer of a folder.

    Raises:
        WeightFormatError: there is no tokenizer.json, or a file is broken.
    """
    path = folder.member("tokenizer.json")
    if path is None:
        others = [n for n in ("tokenizer.model", "vocab.json") if folder.member(n) is not None]
        has = f"; {others[0]} alone is not read" if others else ""
        raise WeightFormatError(
            f"{folder.label}: has no tokenizer.json{has}: save the tokenizer with transformers'"
            " fast class, or take a GGUF file of the model"
        )
    what = f"{folder.label}/tokenizer.json"
    if path.stat().st_size > MAX_JSON_BYTES:
        raise WeightFormatError(f"{what}: is larger than {MAX_JSON_BYTES} bytes")
    try:
        source = path.read_bytes().decode()
    except UnicodeDecodeError:
        raise WeightFormatError(f"{what}: is not UTF-8; get it again") from None
    config = (folder.json("special_tokens_map.json") or {}) | _present(
        folder.json("tokenizer_config.json") or {}
    )
    ends = [folder.json(name) or {} for name in ("generation_config.json", "config.json")]
    ends += [text for d in ends if isinstance(text := d.get("text_config"), dict)]
    return parts_of(
        source,
        config=config,
        ids=ends,
        templates=chat_templates(folder, config),
        what=what,
    )


def parts_of(
    source: str,
    *,
    config: Mapping[str, Any],
    ids: list[dict[str, Any]],
    templates: Mapping[str, str],
    what: str = "tokenizer.json",
) -> Parts:
    """Put a tokenizer together.

    Args:
        source: the text of tokenizer.json.
        config: tokenizer_config.json.
        ids: objects that may have bos_token_id, eos_token_id and pad_token_id, best first.
        templates: chat templates by name.
        what: what messages call tokenizer.json.
    """
    codec = LibraryCodec(source, what)
    size = len(codec.tokens)

    def named(role: str) -> int | None:
        """The id of a special token, by its text or else by the first file that has its id."""
        token = config.get(f"{role}_token")
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and text in codec.ids:
            return codec.ids[text]
        return next((i for d in ids for i in _ids(d, f"{role}_token_id", size)), None)

    bos, own_eos = named("bos"), named("eos")
    ends = [i for i in [own_eos] if i is not None]
    ends += [i for d in ids for i in _ids(d, "eos_token_id", size)]
    eos_ids = tuple(dict.fromkeys(ends)) or end_ids([], codec.ids, bytes(codec.types))
    prefix = codec.prefix
    wish = config.get("add_bos_token")
    if wish is False:
        prefix = ()
    elif wish is True and bos is not None and bos not in prefix:
        prefix = (bos,)
    vocabulary = vocabulary_of(
        codec,
        bos_id=bos,
        eos_ids=eos_ids,
        pad_id=named("pad"),
        unk_id=named("unk"),
        add_bos=bool(prefix),
        chat_template=templates.get("default"),
    )
    return Parts(vocabulary, codec, prefix, templates)


def _present(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _ids(values: Mapping[str, Any], key: str, size: int) -> list[int]:
    """The ids under a key, one or a list; what is no id of this vocabulary is left out."""
    found = values.get(key)
    found = found if isinstance(found, list) else [found]
    return [i for i in found if type(i) is int and 0 <= i < size]


def chat_templates(folder: ModelFolder, config: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return chat templates by name: those of files first, then those of `config`, which is
    tokenizer_config.json.
    """
    if config is None:
        config = folder.json("tokenizer_config.json") or {}
    found: dict[str, str] = {}
    if (own := folder.text("chat_template.jinja")) is not None:
        found["default"] = own
    if (folder.path / _TEMPLATES).is_dir():
        for path in sorted((folder.path / _TEMPLATES).glob("*.jinja")):
            text = folder.text(f"{_TEMPLATES}/{path.name}")
            if text is not None:
                found[path.stem] = text
    older = folder.json("chat_template.json") or {}
    for source in (older.get("chat_template"), config.get("chat_template")):
        if isinstance(source, str):
            found.setdefault("default", source)
        for item in source if isinstance(source, list) else []:
            match item:
                case {"name": str(name), "template": str(template)}:
                    found.setdefault(name, template)
                case _:
                    raise WeightFormatError(
                        f"{folder.label}/tokenizer_config.json: a chat template in a list must have"
                        " a name and a template"
                    )
    return found
