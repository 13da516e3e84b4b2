"""tokenizer.json files of tiny vocabularies, built with the library itself."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from tests.tokenizer.vocabularies import letters

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def byte_level(*, bos: bool = False) -> Tokenizer:
    """As Qwen and Llama 3: every byte, a few merges, special and added tokens."""
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "hello"), ("ð", "Ł")]
    texts = [*letters(), *(a + b for a, b in merges)]
    library = Tokenizer(models.BPE({t: i for i, t in enumerate(texts)}, merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"])
    library.add_tokens([AddedToken("<tool é>", special=False)])
    if bos:
        library.post_processor = TemplateProcessing(
            single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", 262)]
        )
    return library


def sentencepiece() -> Tokenizer:
    """As Llama 2 and Gemma: `▁` for spaces, byte tokens, BOS in front."""
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    merges = [("h", "i"), ("▁", "hi"), ("▁", "▁")]
    texts += ["▁", "h", "i", "!", *(a + b for a, b in merges)]
    library = Tokenizer(
        models.BPE(
            {t: i for i, t in enumerate(texts)},
            merges,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return library


def write(folder: Path, library: Tokenizer, files: dict[str, Any] | None = None) -> Path:
    """A folder with this tokenizer; a file is the text itself or a JSON value."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(library.to_str())
    for name, value in (files or {}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))
    return folder
