"""Check that llama.cpp reads what `infer.weights.gguf_writer` writes.

    python scripts/check_gguf_writer.py MODEL.gguf --llama-python PYTHON

Rewrites the model through our reader and writer, as one file and in parts, and lets llama.cpp
generate greedily from the original and from both: same metadata, same tokens.  PYTHON is an
interpreter that has llama-cpp-python; it needs nothing of ours.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PROMPTS = ["The capital of France is", "Water boils at", "def fibonacci(n):"]
NUM_TOKENS = 48


def report(path: str) -> dict[str, Any]:
    """Return the metadata and the greedy continuations that llama.cpp finds in a file."""
    from llama_cpp import Llama

    model = Llama(model_path=path, n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False)
    continuations = []
    for prompt in PROMPTS:
        model.reset()
        ids = model.tokenize(prompt.encode())
        stream = model.generate(ids, top_k=1, temp=0.0)
        continuations.append([next(stream) for _ in range(NUM_TOKENS)])
    ours = ("split.no", "split.count", "split.tensors.count")
    metadata = {key: value for key, value in model.metadata.items() if key not in ours}
    text = model.detokenize(continuations[0]).decode(errors="replace")
    return {"metadata": metadata, "tokens": continuations, "text": text}


def rewrite(model: Path, folder: Path) -> dict[str, Path]:
    """Write the model anew, whole and in parts; return the files to open."""
    from infer.weights.gguf import GGUFFile
    from infer.weights.gguf_writer import metadata_of, tensors_of, write_gguf

    with GGUFFile.open(model) as file:
        metadata, tensors = metadata_of(file), tensors_of(file)
        size = sum(t.nbytes for t in file.tensors.values())
        (whole,) = write_gguf(folder / "whole.gguf", metadata, tensors)
        parts = write_gguf(folder / "split.gguf", metadata, tensors, max_part_bytes=size // 3)
    return {"rewritten": whole, f"in {len(parts)} parts": parts[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-python", help="an interpreter with llama-cpp-python")
    parser.add_argument("--report", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.report:
        print(json.dumps(report(str(args.model))))
        return 0
    if not args.llama_python:
        parser.error("--llama-python is needed: an interpreter with llama-cpp-python")

    def ask(path: Path) -> dict[str, Any]:
        command = [args.llama_python, __file__, str(path), "--report"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return json.loads(done.stdout.splitlines()[-1])

    want, failures = ask(args.model), 0
    print(f"original: {want['text']!r}")
    with tempfile.TemporaryDirectory() as folder:
        for name, path in rewrite(args.model, Path(folder)).items():
            got = ask(path)
            same = {key: got[key] == want[key] for key in ("metadata", "tokens")}
            failures += not all(same.values())
            said = [f"{k} {'same' if v else 'DIFFERENT'}" for k, v in same.items()]
            print(f"{name}: {', '.join(said)}")
    count = len(PROMPTS) * NUM_TOKENS
    print("FAILED" if failures else f"passed: {count} tokens of {len(PROMPTS)} prompts")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
