"""Summaries of stand-in files: literals of the two real models' headers, and refusals."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from infer.errors import WeightFormatError
from infer.plan.shape import AttentionShape, kv_bytes_per_token
from infer.weights.summary import TypeTotal, summarise


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    type_name: str
    nbytes: int


@dataclass
class File:
    """What GGUFFile offers, without a file."""

    metadata: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    paths: tuple[str, ...] = ()

    def __enter__(self) -> "File":
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass


def tensors(*rows: tuple[str, tuple[int, ...], str, int]) -> dict[str, Tensor]:
    return {row[0]: Tensor(*row) for row in rows}


def smollm2() -> File:
    """The header of SmolLM2-135M-Instruct.Q4_1.gguf with its tensors merged into three."""
    meta = {
        "general.architecture": "llama",
        "general.name": "Smollm2 135M",
        "llama.block_count": 30,
        "llama.context_length": 8192,
        "llama.embedding_length": 576,
        "llama.feed_forward_length": 1536,
        "llama.attention.head_count": 9,
        "llama.attention.head_count_kv": 3,
        "llama.vocab_size": 49152,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": ["x"] * 49152,
        "tokenizer.ggml.token_type": np.ones(49152, np.int32),
        "tokenizer.chat_template": "{% for message in messages %}",
    }
    embed = ("token_embd.weight", (49152, 576), "Q8_0", 30_081_024)
    rest = ("blk.0.rest", (106_168_320,), "Q4_1", 66_355_200)
    norms = [(f"blk.{i}.norm", (1171,), "F32", 4684) for i in range(30)]
    return File(meta, tensors(embed, rest, *norms))


def gemma3(**extra: Any) -> File:
    meta = {
        "general.architecture": "gemma3",
        "gemma3.block_count": 18,
        "gemma3.context_length": 32768,
        "gemma3.embedding_length": 640,
        "gemma3.attention.head_count": 4,
        "gemma3.attention.head_count_kv": 1,
        "gemma3.attention.key_length": 256,
        "gemma3.attention.value_length": 256,
        "gemma3.attention.sliding_window": 512,
        **extra,
    }
    return File(meta, tensors(*((f"blk.{i}.x", (1,), "F32", 4) for i in range(18))))


def test_gqa_llama():
    found = summarise(smollm2())
    assert found.num_layers == 30
    assert found.layers[0] == AttentionShape(num_kv_heads=3, k_head_dim=64, v_head_dim=64)
    assert (found.head_dim, found.num_heads, found.num_kv_heads) == (64, 9, 3)
    assert kv_bytes_per_token(found.layers_with(2)) == 2 * 30 * 3 * 64 * 2 == 23040
    assert kv_bytes_per_token(found.layers_with(4)) == 46080
    assert found.vocab_size == 49152
    assert found.num_params == 49152 * 576 + 106_168_320 + 30 * 1171
    assert found.weight_bytes == 30_081_024 + 66_355_200 + 30 * 4684
    assert list(found.types) == ["Q4_1", "Q8_0", "F32"]  # most bytes first
    assert found.types["F32"] == TypeTotal(tensors=30, params=35_130, num_bytes=140_520)
    assert (found.tokenizer, found.pre_tokenizer, found.chat_template) == ("gpt2", "smollm", True)
    assert found.window is None
    assert found.shape().weight_bytes == found.weight_bytes


def test_gemma3_slides_in_five_of_six_layers():
    found = summarise(gemma3())
    full = [i for i, layer in enumerate(found.layers) if layer.window is None]
    assert full == [5, 11, 17]
    assert (found.window, found.num_sliding_layers, found.head_dim) == (512, 15, 256)
    assert kv_bytes_per_token(found.layers) == 18 * 2 * 256 * 2
    assert (found.tokenizer, found.chat_template) == (None, False)


@pytest.mark.parametrize(
    ("pattern", "full"),
    [
        (3, [2, 5, 8, 11, 14, 17]),
        (np.array([True, False] * 9), [1, 3, 5, 7, 9, 11, 13, 15, 17]),
        ([True] * 18, []),
    ],
)
def test_pattern_of_the_file_wins(pattern: Any, full: list[int]):
    found = summarise(gemma3(**{"gemma3.attention.sliding_window_pattern": pattern}))
    assert [i for i, layer in enumerate(found.layers) if layer.window is None] == full


def test_mla():
    meta = {
        "general.architecture": "deepseek2",
        "deepseek2.block_count": 61,
        "deepseek2.attention.head_count": 128,
        "deepseek2.attention.head_count_kv": 1,
        "deepseek2.attention.kv_lora_rank": 512,
        "deepseek2.rope.dimension_count": 64,
    }
    file = File(meta, tensors(*((f"blk.{i}.x", (1,), "F32", 4) for i in range(61))))
    assert kv_bytes_per_token(summarise(file).layers) == 70272


def test_experts():
    meta = {
        "general.architecture": "qwen3moe",
        "qwen3moe.expert_count": 8,
        "qwen3moe.expert_used_count": 2,
    }
    rows = (
        ("blk.0.ffn_up_exps.weight", (8, 10, 10), "F16", 1600),
        ("blk.0.attn_q.weight", (10, 10), "F16", 200),
    )
    found = summarise(File(meta, tensors(*rows)))
    assert (found.num_params, found.active_params) == (900, 300)
    assert (found.weight_bytes, found.active_bytes) == (1800, 600)
    assert found.shape().num_params == 300


def test_heads_by_layer():
    meta = dict(smollm2().metadata) | {
        "llama.attention.head_count_kv": np.array([0, 3] * 15, np.int32),
    }
    found = summarise(File(meta, smollm2().tensors))
    assert [layer.num_kv_heads for layer in found.layers[:3]] == [0, 3, 0]
    assert found.num_kv_heads == 3
    assert kv_bytes_per_token(found.layers) == 11520


def test_a_container_without_a_decoder():
    meta = {"general.architecture": "llama"}
    found = summarise(File(meta, tensors(("a", (2, 4), "F32", 32))))
    assert (found.layers, found.num_params, found.context_length) == ((), 8, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": None}, "does not say general.architecture"),
        ({"general.architecture": 7}, "general.architecture is a int, must be str"),
        ({"llama.block_count": 2**60}, "block_count is 1152921504606846976, but the file has 32"),
        ({"llama.block_count": "many"}, "llama.block_count is a str, must be int"),
        ({"llama.block_count": True}, "llama.block_count is a bool, must be int"),
        ({"llama.attention.head_count_kv": -3}, "head_count_kv is -3, must be one or 30 counts"),
        ({"llama.attention.head_count_kv": [3, 3]}, "must be one or 30 counts"),
        ({"llama.attention.head_count": 9.5}, "head_count is 9.5, must be an integer"),
        ({"llama.embedding_length": -1}, "embedding_length is -1, must be at least 0"),
        ({"tokenizer.ggml.model": 3}, "tokenizer.ggml.model is a int, must be str"),
        ({"tokenizer.ggml.scores": np.ones(4, np.uint8)}, "scores must be an array of floats"),
        ({"tokenizer.ggml.token_type": np.ones(4, np.int32)}, "has 4 entries for 49152 tokens"),
    ],
)
def test_refusals(change: dict[str, Any], message: str):
    file = smollm2()
    with pytest.raises(WeightFormatError, match=message):
        summarise(dataclasses.replace(file, metadata=file.metadata | change))


def test_no_heads_is_no_division():
    found = summarise(
        dataclasses.replace(
            smollm2(), metadata=smollm2().metadata | {"llama.attention.head_count": 0}
        )
    )
    assert found.layers[0].k_head_dim == 0
