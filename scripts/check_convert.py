"""Check that transformers and llama.cpp run what `infer convert` writes as the same models.

    python scripts/check_convert.py MODEL.gguf --peers PYTHON
    python scripts/check_convert.py --families --peers PYTHON [case ...]

A model goes GGUF -> folder -> GGUF in float32.  transformers loads the folder and must give our ids
for texts, our logits and our greedy ids; llama.cpp loads the GGUF file and must give our greedy
ids.  `--families` does the same with the tiny checkpoints of the tests, without tokenizers; where
llama.cpp has no such mechanism (see check_gguf_families.py), its logits differ.  PYTHON is an
interpreter that has transformers, torch and llama-cpp-python; it needs nothing of ours.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TEXTS = [
    "The capital of France is",
    "Water boils at",
    "def fibonacci(n):",
    "  Two  spaces, 1234567 and naïve 你好 🚀\n\n\tend",
]
NUM_TOKENS = 32


def of_transformers(folder: str, tokens: list[list[int]], new: int) -> dict[str, Any]:
    """Return ids of the texts, logits at the last of `tokens`, and greedy continuations."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids, chat = [], None
    if (Path(folder) / "tokenizer.json").exists():
        tokenizer = AutoTokenizer.from_pretrained(folder)
        ids = [tokenizer(text).input_ids for text in TEXTS]
        if tokenizer.chat_template:
            messages = [{"role": "user", "content": "Hi"}]
            chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
            chat = chat if isinstance(chat, list) else chat["input_ids"]
    logits, greedy = [], []
    with torch.no_grad():
        for row in tokens:
            logits.append(model(torch.tensor([row])).logits[0, -1].tolist())
            out = model.generate(
                torch.tensor([row]),
                attention_mask=torch.ones(1, len(row), dtype=torch.long),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            greedy.append(out[0, len(row) :].tolist())
    return {"ids": ids, "chat": chat, "logits": logits, "greedy": greedy}


def of_llama_cpp(path: str, tokens: list[list[int]], new: int) -> dict[str, Any]:
    """The same of a GGUF file."""
    from llama_cpp import Llama

    model = Llama(path, n_ctx=256, n_threads=2, logits_all=True, type_k=0, type_v=0, verbose=False)
    logits, greedy = [], []
    for row in tokens:
        # By hand: llama.cpp's sampler needs a vocabulary.
        model.reset()
        model.eval(row)
        logits.append(model.scores[len(row) - 1].tolist())
        found = []
        for at in range(len(row), len(row) + new):
            found.append(int(model.scores[at - 1].argmax()))
            model.eval(found[-1:])
        greedy.append(found)
    ids = (
        [model.tokenize(text.encode()) for text in TEXTS]
        if model.metadata.get("tokenizer.ggml.model") != "none"
        else []
    )
    return {"ids": ids, "logits": logits, "greedy": greedy}


def ask(peers: str, engine: str, path: Path, tokens: list[list[int]], new: int) -> dict[str, Any]:
    """Run one of the two above in the peers' interpreter."""
    request = json.dumps([engine, str(path), tokens, new])
    command = [peers, __file__, "--report"]
    done = subprocess.run(command, input=request, capture_output=True, text=True)
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def ours(params: Any, tokens: list[list[int]], new: int) -> dict[str, Any]:
    """Return our logits and greedy continuations."""
    import jax.numpy as jnp
    import numpy as np

    import infer
    from infer.models import decoder

    logits = [np.asarray(decoder.forward(params, jnp.asarray([row])))[0, -1] for row in tokens]
    sampling = infer.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    out = infer.generate(params, tokens, sampling=sampling)
    return {"logits": logits, "greedy": np.asarray(out.tokens).tolist()}


def compare(want: dict[str, Any], have: dict[str, Any]) -> str:
    """Return in words how far a peer is from us."""
    import numpy as np

    if "failed" in have:
        return f"FAILED ({have['failed'][:160]})"
    worst = max(
        float(np.abs(np.asarray(a)[: len(b)] - np.asarray(b)[: len(a)]).max())
        for a, b in zip(want["logits"], have["logits"], strict=True)
    )
    pairs = [
        (a, b)
        for x, y in zip(want["greedy"], have["greedy"], strict=True)
        for a, b in zip(x, y, strict=True)
    ]
    said = f"logits {worst:.1e}, greedy {sum(a == b for a, b in pairs)} of {len(pairs)}"
    if "ids" in want and have.get("ids"):
        said += f", texts {sum(a == b for a, b in zip(want['ids'], have['ids'], strict=True))}"
        said += f" of {len(TEXTS)}"
    if want.get("chat") is not None and "chat" in have:
        said += f", chat {'same' if want['chat'] == have['chat'] else 'DIFFERENT'}"
    return said


def check_model(path: Path, peers: str, scratch: Path) -> None:
    import infer
    from infer.weights.convert import convert

    model = infer.load(path)
    tokenizer = model.tokenizer
    tokens = [tokenizer.encode(text) for text in TEXTS]
    want = ours(model.params, tokens, NUM_TOKENS) | {"ids": tokens}
    if tokenizer.chat_template:
        want["chat"] = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    convert(path, scratch / "hf", dtype="float32")
    [written] = convert(scratch / "hf", scratch / "m.gguf")
    for engine, at in (("transformers", scratch / "hf"), ("llama.cpp", written)):
        print(f"{engine}: {compare(want, ask(peers, engine, at, tokens, NUM_TOKENS))}", flush=True)


def check_family(case: str, peers: str, scratch: Path) -> None:
    from infer.weights.convert import convert
    from infer.weights.folder import load_folder
    from tests.models.test_families import golden, tensors
    from tests.weights import hf_folders

    folder = hf_folders.write(scratch / "hf", golden(case)["config"], tensors(case))
    tokens = [golden(case)["tokens"][:40].tolist()]
    want = ours(load_folder(folder), tokens, 16)
    [written] = convert(folder, scratch / "m.gguf")
    convert(written, scratch / "back")
    for engine, at in (("transformers", scratch / "back"), ("llama.cpp", written)):
        print(f"{case}, {engine}: {compare(want, ask(peers, engine, at, tokens, 16))}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="a GGUF file, or cases of tests/data/families")
    parser.add_argument("--families", action="store_true")
    parser.add_argument("--peers", help="an interpreter with transformers and llama-cpp-python")
    parser.add_argument("--report", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.report:
        engine, path, tokens, new = json.load(sys.stdin)
        of = of_transformers if engine == "transformers" else of_llama_cpp
        print(json.dumps(of(path, tokens, new)))
        return
    if not args.peers:
        parser.error("--peers is needed: an interpreter with transformers and llama-cpp-python")
    sys.path.insert(0, str(ROOT))
    names = args.names
    if args.families and not names:
        names = sorted(p.stem for p in (ROOT / "tests" / "data" / "families").glob("*.npz"))
    for name in names:
        with tempfile.TemporaryDirectory() as scratch:
            check = check_family if args.families else check_model
            try:
                check(name if args.families else Path(name), args.peers, Path(scratch))
            except ValueError as error:
                print(f"{name}: {error}", flush=True)


if __name__ == "__main__":
    main()
