"""A tiny random model as a folder in transformers' layout: bytes as tokens, a chat template."""

from pathlib import Path

from infer.models.params import random_params
from tests.models import tiny
from tests.tokenizer import tokenizer_json
from tests.weights import hf_folders

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "bos_token_id": 262,
    "eos_token_id": 265,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "vocab_size": 268,
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write(folder: Path) -> Path:
    """Write the folder; the same weights every time."""
    config = tiny.llama_config(vocab_size=268, num_tokens=268, max_context=512)
    weights = hf_folders.weights_of(random_params(config, seed=4))
    hf_folders.write(folder, CONFIG, weights)
    special = {"eos_token": "<|im_end|>", "bos_token": "<|bos|>", "chat_template": TEMPLATE}
    files = {"tokenizer_config.json": special}
    return tokenizer_json.write(folder, tokenizer_json.byte_level(), files)
