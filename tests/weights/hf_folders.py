"""Folders in transformers' layout, made of the golden files' weights or of random ones."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors.numpy

from infer.models.params import Params
from infer.models.registry import FAMILIES
from infer.weights.slots import plan

DATA = Path(__file__).parent.parent / "data"

# As transformers 5 writes them (`rope_parameters`), and as version 4 did.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 12,
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 48,
        "max_position_embeddings": 4096,
        "mlp_bias": False,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "pad_token_id": None,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 128,
            "rope_theta": 10000.0,
            "rope_type": "llama3",
        },
        "tie_word_embeddings": False,
        "vocab_size": 96,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "final_logit_softcapping": None,
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 32,
        "intermediate_size": 48,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
        "max_position_embeddings": 4096,
        "num_attention_heads": 4,
        "num_hidden_layers": 7,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 16,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "full_attention": {"factor": 8.0, "rope_theta": 1e6, "rope_type": "linear"},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
        "sliding_window": 8,
        "tie_word_embeddings": True,
        "use_bidirectional_attention": False,
        "vocab_size": 96,
    },
}


def older(name: str) -> dict[str, Any]:
    """The same in the spelling of transformers 4."""
    config = dict(CONFIGS[name])
    parameters = config.pop("rope_parameters")
    if name == "llama":
        return config | {
            "rope_theta": parameters["rope_theta"],
            "rope_scaling": {k: v for k, v in parameters.items() if k != "rope_theta"},
        }
    del config["layer_types"], config["use_bidirectional_attention"]
    del config["tie_word_embeddings"]  # what Gemma's class means when it says nothing
    return config | {
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"type": "linear", "factor": 8.0},
        "sliding_window_pattern": 6,
    }


def golden(name: str) -> dict[str, np.ndarray]:
    """The arrays of a golden file of transformers."""
    return dict(np.load(DATA / f"decoder_{name}.npz"))


def golden_weights(name: str) -> dict[str, np.ndarray]:
    """Its weights, under transformers' names."""
    weights = {k: v for k, v in golden(name).items() if "." in k}
    if name == "gemma3":
        weights.pop("lm_head.weight", None)
    return weights


def write(folder: Path, config: dict[str, Any], weights: dict[str, np.ndarray]) -> Path:
    """Write a folder with the safetensors library."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(
        {k: np.ascontiguousarray(v) for k, v in weights.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return folder


def weights_of(params: Params) -> dict[str, np.ndarray]:
    """The weights of `params` under transformers' names, Gemma's norms without the one."""
    layout = FAMILIES[params.config.family].hf
    assert layout is not None
    slots = jax.tree.leaves(plan(params.config, layout.layer_names, layout.global_names))
    return {
        slot.tensor: np.asarray(leaf) - (layout.norm_plus_one and slot.field.endswith("norm"))
        for slot, leaf in zip(slots, jax.tree.leaves(params), strict=True)
    }
