"""From a GGUF file to Params: a file that gguf-py writes against its twin in memory, refusals."""

from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import infer
from infer import backend
from infer.config import ModelConfig, RopeScalingKind
from infer.errors import CapacityError, ConfigError, WeightFormatError
from infer.models import decoder
from infer.models.params import Params, random_params
from infer.models.registry import FAMILIES
from infer.quant.qarray import QArray
from infer.weights.load import load_gguf
from infer.weights.slots import plan
from tests.models.tiny import gemma3_config, llama_config

TYPES = gguf.GGMLQuantizationType


def _config(family: str) -> ModelConfig:
    make = {"llama": lambda: llama_config(intermediate_size=64, tied_embeddings=False)}
    return make.get(family, gemma3_config)()


def _metadata(writer: gguf.GGUFWriter, c: ModelConfig) -> None:
    writer.add_context_length(c.max_context)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_heads)
    writer.add_head_count_kv(c.num_kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.norm_eps)
    writer.add_rope_freq_base(c.layers[-1].rope.theta)
    writer.add_eos_token_id(5)
    writer.add_bos_token_id(4)
    writer.add_token_list([f"t{i}" for i in range(c.num_tokens)])
    if c.family == "gemma3":
        writer.add_sliding_window(5)
        writer.add_uint32("gemma3.attention.sliding_window_pattern", 3)
        writer.add_float32("gemma3.final_logit_softcapping", 30.0)


def _write(
    path: Path,
    params: Params,
    *,
    quantise: bool = False,
    change=lambda name, value: value,
    architecture: str | None = None,
    extra: dict[str, np.ndarray] | None = None,
    more=lambda writer: None,
) -> Path:
    """Write `params` as a converter would: q and k of a Llama with their rows permuted."""
    c = params.config
    writer = gguf.GGUFWriter(str(path), architecture or c.family)
    _metadata(writer, c)
    more(writer)
    family = FAMILIES[c.family]
    wanted = jax.tree.leaves(plan(c, family.layer_names, family.global_names))
    stored = {}
    for slot, leaf in zip(wanted, jax.tree.leaves(params), strict=True):
        value = np.asarray(leaf)
        stored[slot.tensor] = value if slot.rows is None else value[np.argsort(slot.rows)]
    for name, value in [*stored.items(), *(extra or {}).items()]:
        value = change(name, value)
        if value is None:
            continue
        if quantise and value.ndim == 2:
            packed = gguf.quants.quantize(value, TYPES.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=TYPES.Q8_0)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def twin(request) -> Params:
    return random_params(_config(request.param), seed=3)


TOKENS = jnp.asarray([[1, 2, 3, 5, 8, 13, 21, 34, 55]], jnp.int32)


def test_a_file_gives_the_weights_and_the_logits_of_its_twin(twin: Params, tmp_path: Path) -> None:
    loaded = load_gguf(_write(tmp_path / "m.gguf", twin))
    assert loaded.config.eos_ids == (5,)
    assert loaded.config.bos_id == 4
    for have, want in zip(jax.tree.leaves(loaded), jax.tree.leaves(twin), strict=True):
        np.testing.assert_array_equal(have, want)
    forward = jax.jit(decoder.forward)
    np.testing.assert_allclose(
        forward(loaded, TOKENS)[..., : twin.config.num_tokens],
        forward(twin, TOKENS)[..., : twin.config.num_tokens],
        atol=1e-5,
    )


def test_packed_weights_decode_to_the_unpacked_ones(tmp_path: Path) -> None:
    twin = random_params(_config("llama"), seed=3)
    path = _write(tmp_path / "m.gguf", twin, quantise=True)
    packed, plain = load_gguf(path, packed="blocks"), load_gguf(path)
    assert isinstance(packed.layers[0].q, QArray)
    assert packed.layers[0].q.data.dtype == jnp.uint8
    forward = jax.jit(decoder.forward)
    np.testing.assert_allclose(
        forward(packed, TOKENS)[..., :90], forward(plain, TOKENS)[..., :90], atol=1e-5
    )
    out = [
        infer.generate(p, [[1, 2, 3]], sampling=infer.SamplingParams(temperature=0, max_tokens=5))
        for p in (packed, plain)
    ]
    np.testing.assert_array_equal(out[0].tokens, out[1].tokens)


def test_progress_ends_at_the_whole(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    load_gguf(
        _write(tmp_path / "m.gguf", random_params(_config("llama"), seed=3)),
        progress=lambda done, total: calls.append((done, total)),
    )
    assert calls[-1][0] == calls[-1][1] > 0
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_bfloat16_weights_are_half_the_bytes(tmp_path: Path) -> None:
    path = _write(tmp_path / "m.gguf", random_params(_config("gemma3"), seed=3))
    assert load_gguf(path, dtype="bfloat16").dtype == jnp.bfloat16


def test_the_divisor_tensor_scales_the_rotary_frequencies(tmp_path: Path) -> None:
    twin = random_params(_config("llama"), seed=3)
    divisors = np.asarray([1, 1, 2, 8], np.float32)
    loaded = load_gguf(_write(tmp_path / "m.gguf", twin, extra={"rope_freqs.weight": divisors}))
    scaling = loaded.config.layers[0].rope.scaling
    assert scaling is not None
    assert scaling.kind is RopeScalingKind.DIVISORS
    assert scaling.divisors == (1.0, 1.0, 2.0, 8.0)


def test_gemma_norms_come_with_their_one_added_and_the_head_is_the_embedding(
    tmp_path: Path,
) -> None:
    twin = random_params(_config("gemma3"), seed=3)
    gain = np.full(32, 1.5, np.float32)
    change = lambda name, value: gain if name == "output_norm.weight" else value
    loaded = load_gguf(_write(tmp_path / "m.gguf", twin, change=change))
    np.testing.assert_array_equal(loaded.final_norm, gain)
    assert loaded.lm_head is None
    assert loaded.config.tied_embeddings
    hidden = jnp.ones((1, 32))
    # RMS of ones is 1: the head sees the gain itself.
    logits = decoder.logits(loaded, hidden)[0, :90]
    want = np.asarray(loaded.embed)[:90] @ gain
    np.testing.assert_allclose(logits, 30 * np.tanh(want / 30), rtol=1e-5)


def test_every_missing_stray_and_misshapen_tensor_is_in_one_error(tmp_path: Path) -> None:
    def change(name: str, value: np.ndarray) -> np.ndarray | None:
        if name == "blk.1.ffn_up.weight":
            return None
        return value[:-1] if name == "blk.0.attn_v.weight" else value

    path = _write(
        tmp_path / "m.gguf",
        random_params(_config("llama"), seed=3),
        change=change,
        extra={"blk.7.ffn_up.weight": np.zeros((2, 1), np.float32)},
    )
    with pytest.raises(WeightFormatError) as error:
        load_gguf(path)
    message = str(error.value)
    assert "blk.1.ffn_up.weight is missing" in message
    assert "blk.0.attn_v.weight is [15, 32], must be [16, 32]" in message
    assert "blk.7.ffn_up.weight has no place in a llama model" in message
    assert "\n" not in message


def test_a_stray_tensor_is_refused(tmp_path: Path) -> None:
    path = _write(
        tmp_path / "m.gguf",
        random_params(_config("llama"), seed=3),
        extra={"blk.0.attn_sinks.weight": np.zeros(4, np.float32)},
    )
    with pytest.raises(WeightFormatError, match=r"blk\.0\.attn_sinks\.weight has no place"):
        load_gguf(path)


def test_an_unknown_architecture_lists_the_known_ones(tmp_path: Path) -> None:
    params = random_params(_config("llama"), seed=3)
    path = _write(tmp_path / "m.gguf", params, architecture="mamba")
    with pytest.raises(ConfigError, match=r"'mamba' is not supported.*gemma3.*llama"):
        load_gguf(path)


def test_a_mixture_of_experts_is_refused_by_name(tmp_path: Path) -> None:
    params = random_params(_config("llama"), seed=3)
    path = _write(tmp_path / "m.gguf", params, more=lambda w: w.add_expert_count(8))
    with pytest.raises(ConfigError, match="8 experts"):
        load_gguf(path)


def test_too_little_memory_is_said_before_loading_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _write(tmp_path / "m.gguf", random_params(_config("llama"), seed=3))
    monkeypatch.setattr(backend, "free_memory_bytes", lambda: 1000)
    with pytest.raises(CapacityError, match=r"as float32 needs .* GiB, .* are free; packed=True"):
        load_gguf(path)


def test_names_and_paths_that_lead_nowhere() -> None:
    with pytest.raises(ConfigError, match=r"'gpt-9' is neither a known model \(.*smollm2-135m.*\)"):
        infer.load("gpt-9")
    with pytest.raises(ConfigError, match="dtype is float99"):
        infer.load(__file__, dtype="float99")
    with pytest.raises(WeightFormatError):
        infer.load(__file__)
