"""The two real files against float32 transformers; the golden files are made by
scripts/goldens/decoder.py --real.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import infer
from infer.models import decoder
from infer.weights.load import load_gguf
from tests.real_models import real_model_path

pytestmark = [pytest.mark.real, pytest.mark.optimized]
DATA = Path(__file__).parent.parent / "data"
MODELS = {"smollm2": "smollm2-135m", "gemma3": "gemma3-270m"}
LENGTH = 288


@functools.cache
def _model(name: str) -> infer.Model:
    return infer.load(real_model_path(MODELS[name]))


@pytest.mark.parametrize("name", MODELS)
def test_real_files_agree_with_transformers(name: str) -> None:
    golden = dict(np.load(DATA / f"real_{name}.npz"))
    params = _model(name).params
    forward = jax.jit(decoder.forward)
    for text in ("prose", "code", "facts"):
        ids = golden[f"{text}_tokens"]
        assert 200 <= ids.size <= LENGTH
        padded = np.zeros((1, LENGTH), np.int32)
        padded[0, : ids.size] = ids
        logits = np.asarray(forward(params, jnp.asarray(padded))[0, : ids.size])
        shifted = logits[:-1].astype(np.float64)
        top = shifted.max(axis=1)
        nll = (
            np.log(np.exp(shifted - top[:, None]).sum(axis=1))
            + top
            - shifted[np.arange(ids.size - 1), ids[1:]]
        )
        assert abs(nll.mean() / golden[f"{text}_nll"].mean() - 1) < 1e-3
        sure = golden[f"{text}_gap"] > 0.25
        assert (logits.argmax(axis=1) == golden[f"{text}_top1"])[sure].all()
        rows = [0, ids.size // 2, ids.size - 1]
        worst = np.abs(logits[rows, :2048] - golden[f"{text}_logits"]).max()
        print(
            f"{name} {text}: mean NLL {nll.mean():.6f} against "
            f"{golden[f'{text}_nll'].mean():.6f}, worst logit {worst:.2e}"
        )
        assert worst < 5e-3


@pytest.mark.parametrize("name", MODELS)
def test_the_tokenizer_of_the_file_gives_the_ids_of_llama_cpp(name: str) -> None:
    golden = dict(np.load(DATA / f"real_{name}.npz"))
    tokenizer = _model(name).tokenizer
    for text in ("prose", "code", "facts"):
        ids = golden[f"{text}_tokens"].tolist()
        assert tokenizer.encode(tokenizer.decode(ids)) == ids


@pytest.mark.parametrize(
    ("name", "start"),
    [("smollm2", " Paris."), ("gemma3", " the capital of the country of France.")],
)
def test_the_capital_of_france(name: str, start: str) -> None:
    model = _model(name)
    out = model.generate(
        ["The capital of France is"], infer.SamplingParams(temperature=0, max_tokens=16)
    )
    assert out.text[0].startswith(start)
    assert out.tokens.shape == (1, 16)


def test_packed_weights_give_the_logits_of_unpacked_ones() -> None:
    path = real_model_path("smollm2-135m")
    packed = load_gguf(path, packed="blocks")  # native products round the activations
    ids = jnp.asarray([[1, 2, 3, 5, 8, 13, 21, 34]], jnp.int32)
    forward = jax.jit(decoder.forward)
    difference = forward(packed, ids) - forward(_model("smollm2").params, ids)
    # Packed rows are multiplied a tile at a time, whose sums XLA adds in another order.
    assert float(jnp.abs(difference).max()) < 5e-3
    assert float(jnp.abs(difference).mean()) < 1e-3


def test_chat_ends_with_the_models_end_of_turn() -> None:
    model = _model("smollm2")
    messages = [
        {"role": "user", "content": "What is the capital of France? Answer in one short sentence."}
    ]
    ids = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    out = model.generate([ids], infer.SamplingParams(temperature=0, max_tokens=48))
    assert "Paris" in out.text[0]
    assert out.finish_reason == ["stop"]
    assert "<|im_end|>" not in out.text[0]
