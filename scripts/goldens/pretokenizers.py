"""Write tests/data/pretokenizers.json: how llama.cpp cuts words under every pre-tokenizer's name.

    python scripts/goldens/pretokenizers.py

Needs llama-cpp-python, gguf and tokenizers; neither JAX nor this package.  The vocabulary is made
for the purpose: byte-level BPE whose merges are learnt from uncut text, across spaces, digits,
newlines and symbols, so that a cut in another place gives other ids.
"""

import argparse
import base64
import hashlib
import json
import tempfile
from pathlib import Path
from runpy import run_path

import gguf
import llama_cpp
import tokenizers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

ROOT = Path(__file__).resolve().parents[2]
HASH_BYTES = 2
NUM_MERGES = 4000
# llama.cpp's names (`llama_vocab::impl::load`), without those that are not byte-level.
NAMES = """
default minicpm5 llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano
deepseek-llm deepseek-coder deepseek-v3 spark2_5 youtu falcon mpt starcoder gpt-2 phi-2 jina-es
jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jais-2 jina-v1-en jina-v2-code
roberta-bpe refact command-r qwen2 deepseek-r1-qwen kormo f2llmv2 qwen35 stablelm2 olmo dbrx
smaug-bpe poro-chat glm4 glm5 chatglm-bpe viking jais tekken smollm codeshell bloom gpt3-finnish
exaone exaone4 exaone-moe chameleon minerva-7b megrez gpt-4o llama4 kanana2 talkie
granite-embed-multi-97m tiny_aya cohere2moe superbpe trillion granite-docling bailingmoe
bailingmoe2 llada-moe seed-coder hunyuan hunyuan-dense hy_v4 joyai-llm kimi-k2 ufakzeka grok-2
afmoe laguna minimax-m2 solar-open mellum2
""".split()


def learn_merges(texts: list[str]) -> list[str]:
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=256 + NUM_MERGES,
        initial_alphabet=alphabet,
        show_progress=False,
        max_token_length=12,
    )
    learner.train_from_iterator(texts, trainer)
    return [" ".join(pair) for pair in json.loads(learner.to_str())["model"]["merges"]]


def write_vocabulary(path: Path, name: str, merges: list[str]) -> None:
    tokens = ["<first>", "<last>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += dict.fromkeys(merge.replace(" ", "") for merge in merges)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def digest(ids: list[int]) -> bytes:
    return hashlib.blake2b(json.dumps(ids).encode(), digest_size=HASH_BYTES).digest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    out = ROOT / "tests" / "data" / "pretokenizers.json"
    parser.add_argument("--out", default=out, type=Path)
    arguments = parser.parse_args()
    texts = run_path(str(ROOT / "tests" / "cases" / "strings.py"))["word_cut_strings"]()
    merges = learn_merges(texts)
    names: dict[str, int] = {}
    sets: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in NAMES:
            path = Path(folder) / f"{name}.gguf"
            write_vocabulary(path, name, merges)
            model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
            ids = [model.tokenize(text.encode(), add_bos=False) for text in texts]
            hashes = base64.b64encode(b"".join(map(digest, ids))).decode()
            if hashes not in sets:
                sets.append(hashes)
            names[name] = sets.index(hashes)
            model.close()
            path.unlink()
    found = {
        "llama_cpp_python": llama_cpp.__version__,
        "tokenizers": tokenizers.__version__,
        "count": len(texts),
        "merges": merges,
        "names": names,
        "sets": sets,
    }
    arguments.out.write_text(json.dumps(found, separators=(",", ":"), ensure_ascii=False) + "\n")
    size = arguments.out.stat().st_size
    print(f"{arguments.out}: {size} bytes, {len(texts)} strings, {len(sets)} sets")


if __name__ == "__main__":
    main()
