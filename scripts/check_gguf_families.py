"""Check that the GGUF twins of the tests are files that llama.cpp runs as the same models.

Run in the environment of the golden files, with llama-cpp-python:

    python scripts/check_gguf_families.py [case ...]

Prints the largest difference of llama.cpp's logits from transformers', at the kept positions. Where
llama.cpp has no such mechanism (windows of Mistral, Qwen 2, Phi-3 and StarCoder2; the erf form of
GELU), or takes LongRoPE's factors by the length of its own context, larger ones are expected.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[0] = str(ROOT)

import numpy as np
from llama_cpp import Llama

from tests.models import checkpoint, gguf_twin

F32 = 0  # GGML_TYPE_F32, for the cache


def worst(case: str) -> float:
    """Return the largest difference at the kept positions."""
    golden = dict(np.load(ROOT / "tests" / "data" / "families" / f"{case}.npz"))
    header = json.loads(golden["header"].tobytes())
    weights = {
        name: checkpoint.values(name, tuple(shape), header["norm_base"])
        for name, shape in header["tensors"]
    }
    with tempfile.TemporaryDirectory() as folder:
        path = gguf_twin.write(Path(folder) / "m.gguf", header["config"], weights)
        tokens = golden["tokens"].tolist()
        llama = Llama(
            str(path),
            n_ctx=256,
            n_batch=256,
            logits_all=True,
            type_k=F32,
            type_v=F32,
            n_threads=1,
            verbose=False,
        )
        llama.eval(tokens)
        scores = llama.scores[: len(tokens)][golden["kept"]]
    return float(np.abs(scores - golden["logits"]).max())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    known = sorted(path.stem for path in (ROOT / "tests" / "data" / "families").glob("*.npz"))
    parser.add_argument("cases", nargs="*", default=known)
    for case in parser.parse_args().cases:
        try:
            print(f"{case}: {worst(case):.1e}", flush=True)
        except (ValueError, RuntimeError, AssertionError) as error:
            print(f"{case}: {error}", flush=True)
