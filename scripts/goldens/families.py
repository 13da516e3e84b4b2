"""Golden logits and greedy ids of transformers in float32, one file a case, for
tests/models/test_families.py.

Run in the environment that scripts/peers.sh makes (torch on CPU and transformers):

    python scripts/goldens/families.py tests/data/families [case ...]

The weights come from tests/models/checkpoint.py by name and are not stored.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

# The repository's root in place of this folder, whose tokenizers.py would hide the package.
sys.path[0] = str(Path(__file__).parents[2])

import numpy as np
import safetensors
import torch
import transformers
from safetensors.numpy import load_file, save_file

from tests.models.checkpoint import values

LENGTH, SHORT, PROMPT, NEW = 160, 24, 40, 64
KEPT = [0, 1, 6, 7, 8, 23, 24, 31, 32, 33, 63, 64, 100, 158, 159]
# A step whose two best logits are closer than this could flip by rounding.
LEAST_GAP = 3e-4

SIZES = dict(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=58,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=1e4,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=128,
)


def longrope(pairs: int) -> dict:
    """Return LongRoPE parameters whose original context is below every greedy step."""
    return dict(
        rope_type="longrope",
        rope_theta=1e4,
        short_factor=[1.0 + 0.1 * i for i in range(pairs)],
        long_factor=[1.5 + 0.7 * i for i in range(pairs)],
    )


SLIDING, FULL = "sliding_attention", "full_attention"
# case -> (model type, what differs from SIZES)
CASES = {
    "llama": ("llama", dict(head_dim=14, rope_parameters=LLAMA3)),
    "llama_linear": (
        "llama",
        dict(
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
            rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=3.0),
        ),
    ),
    "llama_dynamic": (
        "llama",
        dict(
            max_position_embeddings=128,
            rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=4.0),
        ),
    ),
    "llama_yarn": (
        "llama",
        dict(
            rope_parameters=dict(
                rope_type="yarn",
                rope_theta=1e4,
                factor=4.0,
                original_max_position_embeddings=128,
            )
        ),
    ),
    "mistral": ("mistral", dict(sliding_window=7)),
    "ministral": (
        "ministral",
        dict(head_dim=12, sliding_window=7, layer_types=[SLIDING, FULL, SLIDING]),
    ),
    "qwen2": ("qwen2", dict(use_sliding_window=True, sliding_window=9, max_window_layers=1)),
    "qwen3": ("qwen3", dict(head_dim=14, tie_word_embeddings=True)),
    "gemma": ("gemma", dict(head_dim=14, num_key_value_heads=1)),
    "gemma2": ("gemma2", dict(head_dim=16, query_pre_attn_scalar=16, sliding_window=7)),
    "gemma3": (
        "gemma3_text",
        dict(
            head_dim=16,
            query_pre_attn_scalar=16,
            sliding_window=7,
            layer_types=[SLIDING, SLIDING, FULL],
            rope_parameters={
                FULL: dict(rope_type="linear", rope_theta=1e6, factor=8.0),
                SLIDING: dict(rope_type="default", rope_theta=1e4),
            },
        ),
    ),
    "phi3": (
        "phi3",
        dict(
            sliding_window=50,
            original_max_position_embeddings=32,
            rope_parameters=longrope(6),
        ),
    ),
    "phi4_mini": (
        "phi3",
        dict(
            tie_word_embeddings=True,
            hidden_size=64,
            original_max_position_embeddings=32,
            rope_parameters=longrope(6) | dict(partial_rotary_factor=0.75),
        ),
    ),
    "smollm3": ("smollm3", dict(num_hidden_layers=5)),
    "olmo2": ("olmo2", dict()),
    "granite": (
        "granite",
        dict(
            embedding_multiplier=3.0,
            attention_multiplier=0.4,
            residual_multiplier=0.7,
            logits_scaling=2.5,
            attention_bias=True,
        ),
    ),
    "starcoder2": ("starcoder2", dict(sliding_window=33)),
    "glm4": ("glm4", dict(head_dim=16)),
    "cohere2": ("cohere2", dict(num_hidden_layers=4, sliding_window=7, logit_scale=0.4)),
    "gpt2": (
        "gpt2",
        dict(n_embd=48, n_layer=3, n_head=4, n_positions=256),
    ),
    "gpt_neox": (
        "gpt_neox",
        dict(rope_parameters=dict(rope_theta=1e4, partial_rotary_factor=0.5)),
    ),
    "gpt_neox_sequential": (
        "gpt_neox",
        dict(
            use_parallel_residual=False,
            rope_parameters=dict(rope_theta=1e4, partial_rotary_factor=0.25),
            hidden_size=64,
        ),
    ),
}


def config_of(case: str) -> transformers.PreTrainedConfig:
    model_type, changes = CASES[case]
    sizes = {} if model_type == "gpt2" else SIZES
    if model_type == "gpt2":
        sizes = {k: SIZES[k] for k in ("vocab_size", "bos_token_id", "eos_token_id")}
    if model_type == "gpt_neox":
        sizes = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
    return transformers.AutoConfig.for_model(model_type, **(sizes | changes))


def build(case: str, folder: Path) -> tuple[torch.nn.Module, dict, list]:
    """Write a checkpoint as transformers does, fill it by name, and load it."""
    transformers.AutoModelForCausalLM.from_config(config_of(case)).save_pretrained(folder)
    path = folder / "model.safetensors"
    norm_base = 0.0 if "gemma" in case else 1.0
    tensors = {
        name: values(name, tensor.shape, norm_base) for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    config = json.loads((folder / "config.json").read_text())
    return model, config, [[name, list(t.shape)] for name, t in tensors.items()]


def greedy(model: torch.nn.Module, prompt: torch.Tensor) -> tuple[np.ndarray, float]:
    """Return the ids that transformers generates, and the smallest gap between two best logits."""
    model.generation_config.eos_token_id = None  # what an absent one would fall back to
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        generation_config=transformers.GenerationConfig(
            do_sample=False, max_new_tokens=NEW, pad_token_id=0, eos_token_id=None, bos_token_id=1
        ),
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert out.sequences.shape[1] == PROMPT + NEW, out.sequences.shape
    best = torch.cat(out.logits).topk(2, dim=-1).values
    return out.sequences[0, prompt.shape[1] :].numpy(), float((best[:, 0] - best[:, 1]).min())


def golden(case: str) -> dict[str, np.ndarray]:
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model, config, tensors = build(case, Path(folder))
        tokens = torch.from_numpy(np.random.RandomState(7).randint(3, 97, (1, LENGTH)))
        # Short first: dynamic scalings of transformers remember the longest sequence they saw.
        short = model(tokens[:, :SHORT]).logits[0, -1].numpy()
        logits = model(tokens).logits[0, KEPT].numpy()
        for seed in range(50):
            prompt = torch.from_numpy(np.random.RandomState(seed).randint(3, 97, (1, PROMPT)))
            ids, gap = greedy(model, prompt)
            if gap > LEAST_GAP and len(set(ids.tolist())) > 5:
                break
        else:
            raise RuntimeError(f"{case}: no prompt with gaps above {LEAST_GAP}")
    print(
        f"{case}: logits up to {np.abs(logits).max():.2f}, smallest gap {gap:.1e} (prompt {seed}), "
        f"{len(set(ids.tolist()))} different ids"
    )
    header = dict(
        config=config,
        tensors=tensors,
        norm_base=0.0 if "gemma" in case else 1.0,
        versions=dict(
            transformers=transformers.__version__,
            torch=torch.__version__,
            safetensors=safetensors.__version__,
            numpy=np.__version__,
        ),
    )
    return dict(
        header=np.frombuffer(json.dumps(header).encode(), np.uint8),
        tokens=tokens[0].numpy().astype(np.int32),
        kept=np.array(KEPT, np.int32),
        logits=logits.astype(np.float32),
        short_logits=short.astype(np.float32),
        prompt=prompt[0].numpy().astype(np.int32),
        greedy=ids.astype(np.int32),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for case in args.cases:
        np.savez_compressed(args.out / f"{case}.npz", **golden(case))
