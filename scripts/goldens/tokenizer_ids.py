"""Write tests/data/tokenizers.json: what llama.cpp makes of the strings of tests/cases/strings.py.

    python scripts/goldens/tokenizer_ids.py SmolLM2-135M-Instruct.Q4_1.gguf gemma-3-270m-q4_k_m.gguf

Needs llama-cpp-python; neither JAX nor this package.
"""

import argparse
import base64
import hashlib
import json
from pathlib import Path
from runpy import run_path

import llama_cpp

ROOT = Path(__file__).resolve().parents[2]
HASH_BYTES = 4
FULL_EVERY = 60
MODELS = ("smollm2", "gemma3")


def digest(plain: list[int], special: list[int]) -> bytes:
    return hashlib.blake2b(json.dumps([plain, special]).encode(), digest_size=HASH_BYTES).digest()


def both(model: llama_cpp.Llama, text: str) -> tuple[list[int], list[int]]:
    raw = text.encode()
    return tuple(model.tokenize(raw, add_bos=False, special=special) for special in (False, True))


def golden(path: str, strings: list[str], *, with_ids: bool) -> dict:
    model = llama_cpp.Llama(path, vocab_only=True, verbose=False)
    vocabulary = llama_cpp.llama_model_get_vocab(model.model)
    ids = [both(model, text) for text in strings]
    found = {"hashes": base64.b64encode(b"".join(digest(*pair) for pair in ids)).decode()}
    if with_ids:
        found["eog"] = [
            i for i in range(model.n_vocab()) if llama_cpp.llama_vocab_is_eog(vocabulary, i)
        ]
        found["ids"] = {
            str(i): ids[i] for i in range(0, len(ids), FULL_EVERY) if len(ids[i][0]) < 40
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs=len(MODELS), metavar="GGUF", help=" then ".join(MODELS))
    parser.add_argument("--out", default=ROOT / "tests" / "data" / "tokenizers.json", type=Path)
    arguments = parser.parse_args()
    cases = run_path(str(ROOT / "tests" / "cases" / "strings.py"))
    strings = cases["strings"]()
    found = {
        "llama_cpp_python": llama_cpp.__version__,
        "count": len(strings),
        "models": {
            name: golden(path, strings, with_ids=True)
            for name, path in zip(MODELS, arguments.files, strict=True)
        },
    }
    arguments.out.write_text(json.dumps(found, separators=(",", ":")) + "\n")
    print(f"{arguments.out}: {arguments.out.stat().st_size} bytes, {len(strings)} strings")


if __name__ == "__main__":
    main()
