"""The GGUF file that llama.cpp's converter would make of a tiny checkpoint, written with gguf-py.

Names come from gguf-py's own table, and what the converter does to tensors is written out here:
nothing is shared with the loader under test.  Needs numpy and gguf alone, so that
scripts/goldens/families.py can hand the files to llama.cpp.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

# transformers' model type -> llama.cpp's architecture.
ARCH = {
    "llama": "llama",
    "mistral": "llama",
    "ministral": "llama",
    "gemma3_text": "gemma3",
    "gpt_neox": "gptneox",
}
# Converted with q and k permuted to adjacent pairs.
_PERMUTED = ("llama", "smollm3", "granite")


def write(
    path: Path,
    config: dict[str, Any],
    tensors: dict[str, np.ndarray],
    *,
    for_llama_cpp: bool = False,
) -> Path:
    """Write the checkpoint as GGUF, all tensors float32.

    Args:
        path: of the new file.
        config: its config.json.
        tensors: by the names of transformers.
        for_llama_cpp: leave out keys that llama.cpp does not read for the architecture.
    """
    arch = ARCH.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(str(path), arch)
    sizes = _sizes(config)
    _metadata(writer, arch, config, sizes, for_llama_cpp)
    number = next(n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, sizes["layers"])
    for name, value in tensors.items():
        stem, suffix = name.rsplit(".", 1)
        renamed = names.get_name(stem)
        if renamed is None and stem == "embed_out":
            renamed = "output"
        assert renamed is not None, f"{name} has no name in {arch}"
        if stem == "lm_head" and config.get("tie_word_embeddings"):
            continue
        writer.add_tensor(f"{renamed}.{suffix}", _converted(arch, name, value, sizes))
    for name, value in _factors(config, sizes).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _sizes(c: dict[str, Any]) -> dict[str, int]:
    heads = c.get("num_attention_heads", c.get("n_head"))
    hidden = c.get("hidden_size", c.get("n_embd"))
    return dict(
        layers=c.get("num_hidden_layers", c.get("n_layer")),
        hidden=hidden,
        heads=heads,
        kv_heads=c.get("num_key_value_heads") or heads,
        head_dim=c.get("head_dim") or hidden // heads,
        ffn=c.get("intermediate_size") or 4 * hidden,
        context=c.get("max_position_embeddings", c.get("n_positions")),
    )


def _converted(arch: str, name: str, value: np.ndarray, sizes: dict[str, int]) -> np.ndarray:
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        return value + 1
    if arch == "gpt2" and value.ndim == 2 and (".c_" in name):
        return np.ascontiguousarray(value.T)
    if arch in _PERMUTED and (".q_proj." in name or ".k_proj." in name):
        n = sizes["heads"] if ".q_proj." in name else sizes["kv_heads"]
        halves = value.reshape(n, 2, value.shape[0] // n // 2, *value.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(value.shape))
    if arch == "gptneox" and "query_key_value" in name:
        by_head = value.reshape(sizes["heads"], 3, sizes["head_dim"], *value.shape[1:])
        return np.ascontiguousarray(by_head.swapaxes(0, 1).reshape(value.shape))
    return value


def _rope(c: dict[str, Any]) -> dict[str, Any]:
    found = c.get("rope_parameters") or {}
    return found.get("full_attention", found)


def _metadata(
    w: gguf.GGUFWriter, arch: str, c: dict[str, Any], sizes: dict[str, int], strict: bool
) -> None:
    rope = _rope(c)
    w.add_context_length(sizes["context"])
    w.add_embedding_length(sizes["hidden"])
    w.add_block_count(sizes["layers"])
    w.add_feed_forward_length(sizes["ffn"])
    w.add_head_count(sizes["heads"])
    w.add_vocab_size(c["vocab_size"])
    w.add_tokenizer_model("none")
    w.add_bos_token_id(c.get("bos_token_id", 1))
    w.add_eos_token_id(c.get("eos_token_id", 2))
    if arch not in ("gpt2", "gptneox"):
        w.add_head_count_kv(sizes["kv_heads"])
    if sizes["head_dim"] * sizes["heads"] != sizes["hidden"]:
        w.add_key_length(sizes["head_dim"])
        w.add_value_length(sizes["head_dim"])
    eps = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
    if arch in ("gpt2", "gptneox", "starcoder2", "cohere2"):
        w.add_layer_norm_eps(next(c[key] for key in eps if key in c))
    else:
        w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    if arch != "gpt2":
        share = rope.get("partial_rotary_factor", 1.0)
        w.add_rope_dimension_count(int(sizes["head_dim"] * share))
        w.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") in ("linear", "yarn"):
        kind = gguf.RopeScalingType(rope["rope_type"])
        w.add_rope_scaling_type(kind)
        w.add_rope_scaling_factor(rope["factor"])
    if original := rope.get("original_max_position_embeddings"):
        w.add_rope_scaling_orig_ctx_len(original)
    if c.get("sliding_window") and not (strict and arch in ("llama", "phi3", "starcoder2")):
        w.add_sliding_window(c["sliding_window"])
        if c.get("layer_types") and not (strict and arch != "gemma3"):
            w.add_sliding_window_pattern([t == "sliding_attention" for t in c["layer_types"]])
    _of_architecture(w, arch, c, rope)


def _of_architecture(
    w: gguf.GGUFWriter, arch: str, c: dict[str, Any], rope: dict[str, Any]
) -> None:
    if arch == "gemma2":
        w.add_attn_logit_softcapping(c["attn_logit_softcapping"])
        w.add_final_logit_softcapping(c["final_logit_softcapping"])
    if arch == "gemma3":
        w.add_rope_freq_base_swa(c["rope_parameters"]["sliding_attention"]["rope_theta"])
    if arch == "granite":
        w.add_attention_scale(c["attention_multiplier"])
        w.add_embedding_scale(c["embedding_multiplier"])
        w.add_residual_scale(c["residual_multiplier"])
        w.add_logit_scale(c["logits_scaling"])
    if arch == "cohere2":
        w.add_logit_scale(c["logit_scale"])
    if arch == "gptneox":
        w.add_parallel_residual(c["use_parallel_residual"])
    if arch == "phi3":
        ratio = c["max_position_embeddings"] / rope["original_max_position_embeddings"]
        original = np.log(rope["original_max_position_embeddings"])
        w.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(ratio) / original)))


def _factors(c: dict[str, Any], sizes: dict[str, int]) -> dict[str, np.ndarray]:
    """Return the tensors of frequency divisors that the converter writes."""
    rope = _rope(c)
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{kind}.weight": np.asarray(rope[f"{kind}_factor"], np.float32)
            for kind in ("long", "short")
        }
    if rope.get("rope_type") != "llama3":
        return {}
    dim, factor, original = (
        sizes["head_dim"],
        rope["factor"],
        rope["original_max_position_embeddings"],
    )
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = original * rope["rope_theta"] ** (-np.arange(0, dim, 2) / dim) / (2 * np.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    divisors = 1 / ((1 - smooth) / factor + smooth)
    return {"rope_freqs.weight": divisors.astype(np.float32)}
