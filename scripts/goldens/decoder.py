"""Golden logits of transformers in float32, for tests/models/test_decoder_golden.py.

Run in the environment that scripts/peers.sh makes (torch on CPU and transformers):

    python scripts/goldens/decoder.py tests/data                               # tiny random
    configurations python scripts/goldens/decoder.py tests/data --real SMOLLM2.gguf GEMMA3.gguf   #
    and the two real files
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

LENGTH = 1400
KEPT = [0, 1, 2, 7, 8, 63, 64, 255, 256, 700, 1023, 1024, 1398, 1399]

TEXTS = {
    "prose": (
        "The lighthouse keeper had lived on the rock for thirty years before anyone asked him what he saw at night. "
        "He said that most of it was darkness, and that darkness was not empty: it had weather in it, and ships, and "
        "the slow turning of the stars. In winter the storms came from the north-west and lasted three days. He would "
        "climb the stairs every four hours to wind the clockwork, and between the climbs he read whatever the supply "
        "boat had brought. He read histories of countries that no longer existed and manuals for engines that he would "
        "never own. When the light was made automatic the company offered him a pension and a small house in the town, "
        "but he could not sleep there. The town had too many lights, he said, and none of them meant anything. In the "
        "end they let him go back, to paint the railings and count the birds, and to write down in a green book the "
        "colour of the sea each morning. The book was found long afterwards. It had two hundred words for grey."
    ),
    "code": (
        "def merge_sorted(left, right):\n    result = []\n    i = j = 0\n    while i < len(left) and j < len(right):\n"
        "        if left[i] <= right[j]:\n            result.append(left[i])\n            i += 1\n        else:\n"
        "            result.append(right[j])\n            j += 1\n    result.extend(left[i:])\n    result.extend(right[j:])\n"
        "    return result\n\n\ndef merge_sort(items):\n    if len(items) <= 1:\n        return items\n"
        "    middle = len(items) // 2\n    return merge_sorted(merge_sort(items[:middle]), merge_sort(items[middle:]))\n\n\n"
        "class Counter:\n    def __init__(self):\n        self.counts = {}\n\n    def add(self, word):\n"
        "        self.counts[word] = self.counts.get(word, 0) + 1\n\n    def most_common(self, n):\n"
        "        return sorted(self.counts.items(), key=lambda pair: -pair[1])[:n]\n"
    ),
    "facts": (
        "Water boils at 100 degrees Celsius at sea level, but at the top of a mountain the air pressure is lower and it "
        "boils at a lower temperature. Die Hauptstadt von Frankreich ist Paris, und die Hauptstadt von Italien ist Rom. "
        "La tour Eiffel a été construite en 1889 pour l'Exposition universelle. The speed of light in a vacuum is "
        "299,792,458 metres per second. In 1969, two people walked on the Moon; a third stayed in orbit. The chemical "
        "formula of table salt is NaCl, and that of glucose is C6H12O6. A triangle with sides 3, 4 and 5 has a right "
        "angle. Japan has four main islands: Hokkaido, Honshu, Shikoku and Kyushu. 東京は日本の首都です。 The derivative of "
        "sin(x) is cos(x), the integral of 1/x is ln|x| + C. An octopus has three hearts and blue blood. The Great Wall "
        "of China is about 21,196 kilometres long, counting all of its branches; it cannot be seen from the Moon."
    ),
}


def tiny_llama() -> torch.nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, head_dim=12, max_position_embeddings=4096, rms_norm_eps=1e-5, rope_theta=10000.0,
            rope_scaling=dict(
                rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position_embeddings=128,
            ),
            tie_word_embeddings=False, attention_bias=True, initializer_range=0.2,
        )
    )  # fmt: skip


def tiny_gemma3() -> torch.nn.Module:
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=7, num_attention_heads=4,
            num_key_value_heads=1, head_dim=16, max_position_embeddings=4096, sliding_window=8, sliding_window_pattern=6,
            rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling=dict(rope_type="linear", factor=8.0),
            query_pre_attn_scalar=16, initializer_range=0.3, attn_implementation="eager",
        )
    )  # fmt: skip


def randomise(model: torch.nn.Module) -> None:
    """Give norms and biases values too, which start as ones and zeros."""
    for name, p in model.named_parameters():
        if p.ndim == 1:
            offset = 0.0 if "bias" in name or isinstance(model, Gemma3ForCausalLM) else 1.0
            # No GGUF Llama biases the output projection; transformers' attention_bias does.
            scale = 0.0 if "o_proj.bias" in name else 0.2
            p.data = offset + scale * torch.randn_like(p)


def tiny(out: Path) -> None:
    for name, make in (("llama", tiny_llama), ("gemma3", tiny_gemma3)):
        torch.manual_seed(0)
        model = make().float().eval()
        randomise(model)
        tokens = torch.randint(0, 96, (1, LENGTH))
        with torch.no_grad():
            logits = model(tokens).logits[0, KEPT].numpy()
        # Weights as float16 would round; tiny ones stay float32.
        weights = {k: v.numpy() for k, v in model.state_dict().items()}
        np.savez_compressed(
            out / f"decoder_{name}.npz",
            tokens=tokens.numpy().astype(np.int32), kept=np.array(KEPT, np.int32), logits=logits, **weights,
        )  # fmt: skip
        print(name, "logits up to", np.abs(logits).max())


def real(out: Path, name: str, path: Path) -> None:
    from llama_cpp import Llama

    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    print(name, model.config)
    vocab = Llama(str(path), vocab_only=True, verbose=False)
    data = {}
    for label, text in TEXTS.items():
        ids = vocab.tokenize(text.encode(), add_bos=name == "gemma3", special=False)[:512]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        logp = torch.log_softmax(logits.double(), -1)
        nll = -logp[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
        top = logits.topk(2, dim=-1)
        data |= {
            f"{label}_tokens": np.array(ids, np.int32),
            f"{label}_nll": nll.numpy().astype(np.float64),
            f"{label}_top1": top.indices[:, 0].numpy().astype(np.int32),
            f"{label}_gap": (top.values[:, 0] - top.values[:, 1]).numpy(),
            f"{label}_logits": logits[[0, len(ids) // 2, len(ids) - 1], :2048].numpy(),
        }
        print(name, label, len(ids), "tokens, mean NLL", nll.mean().item())
    np.savez_compressed(out / f"real_{name}.npz", **data)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--real", nargs=2, type=Path, metavar=("SMOLLM2", "GEMMA3"))
    args = parser.parse_args()
    tiny(args.out)
    if args.real:
        real(args.out, "smollm2", args.real[0])
        real(args.out, "gemma3", args.real[1])
