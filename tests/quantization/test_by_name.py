"""Methods by name, recipe files, calibration text and reports."""

import dataclasses
import json

import numpy as np
import pytest

import infer
from infer import quant
from infer.errors import ConfigError, WeightFormatError
from infer.models.params import Params, random_params
from infer.quantization import by_name, calibration
from infer.quantization.report import in_words, report, widths
from infer.tokenizer import Tokenizer
from tests.models import tiny
from tests.tokenizer import tokenizer_json


def _params() -> Params:
    return random_params(tiny.llama_config(intermediate_size=64), seed=0)


@pytest.mark.parametrize(
    ("name", "options", "method"),
    [
        ("rtn", {"bits": 3, "group_size": 32}, quant.RTN(bits=3, group_size=32)),
        ("gptq", {"act_order": True}, quant.GPTQ(act_order=True)),
        ("awq", {"clip": False, "symmetric": True}, quant.AWQ(clip=False, symmetric=True)),
        (
            "awq",
            {"rounding": "gptq", "damping": 0.1},
            quant.AWQ(rounding="gptq", damping=0.1),
        ),
        ("smoothquant", {"alpha": 0.8, "static": True}, quant.SmoothQuant(alpha=0.8, static=True)),
        (
            "smoothquant",
            {"rounding": "gptq", "damping": 0.1},
            quant.SmoothQuant(
                weights=quant.GPTQ(bits=8, group_size="channel", scale_dtype="float32", damping=0.1)
            ),
        ),
        ("llm-int8", {}, quant.LLMInt8()),
        ("fp8", {"granularity": "block"}, quant.FP8(granularity="block")),
        ("nf4", {"double": False}, quant.NF4(double=False)),
        ("fp4", {}, quant.NF4(levels="fp4")),
        ("mxfp4", {"scale_rule": "rceil"}, quant.MX(scale_rule="rceil")),
        ("mxfp6", {"code": "e3m2"}, quant.MX(code="e3m2")),
        ("mxfp8", {}, quant.MX(code="e4m3")),
        ("nvfp4", {}, quant.NVFP4()),
    ],
)
def test_names_and_options(name: str, options: dict, method: quant.Method) -> None:
    assert by_name.method_of(name, options) == method
    assert by_name.METHODS[name].calibrated == method.calibrated


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gguf", {}, "method is 'gguf'; use rtn, gptq"),
        ("nf4", {"bits": 4}, "bits does not go with nf4, which takes group_size, double"),
        ("nvfp4", {"code": "e2m1"}, "code does not go with nvfp4, which takes hadamard"),
        ("rtn", {"damping": 0.1}, "damping does not go with rtn"),
        ("mxfp6", {"code": "e4m3"}, "code is 'e4m3'; mxfp6 has e2m3 or e3m2"),
        ("rtn", {"symmetric": False, "convention": "full"}, "and this has zero points; add symm"),
        ("awq", {"convention": "full"}, "and awq has zero points; add symmetric"),
        ("awq", {"damping": 0.01}, "damping needs rounding 'gptq'; set it"),
        ("rtn", {"bits": 4.0}, r"bits is 4\.0; use 8, 6, 5"),
        ("rtn", {"bits": 7}, "bits is 7; use 8, 6, 5"),
        ("gptq", {"act_order": 1}, "act_order is 1; use true or false"),
        ("gptq", {"damping": "x"}, "damping is 'x'; use a number"),
        ("rtn", {"group_size": []}, r"group_size is \[\]; use a number of weights"),
        ("fp8", {"code": ["e4m3"]}, r"code is \['e4m3'\]; use a word"),
        ("smoothquant", {"rounding": "awq"}, "rounding is 'awq'; use 'rtn' or 'gptq'"),
        ("smoothquant", {"damping": 0.1}, "damping needs rounding 'gptq'"),
    ],
)
def test_what_does_not_go_together(name: str, options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        by_name.method_of(name, options)


def test_the_default_group_divides_every_matrix() -> None:
    group = lambda *widths: by_name.method_of("rtn", {}, widths).group_size  # type: ignore
    assert (group(), group(256, 1024), group(576, 1536), group(96), group(100)) == (
        128, 128, 64, 32, 128,
    )  # fmt: skip
    assert by_name.method_of("rtn", {"group_size": 16}, (576,)).group_size == 16  # type: ignore
    assert widths(_params()) == {32, 64}


def test_short_names() -> None:
    assert by_name.short("rtn4", (576,)) == quant.RTN(bits=4, group_size=64)
    assert by_name.short("rtn3-g32") == quant.RTN(bits=3, group_size=32)
    assert by_name.short("rtn8-channel") == quant.RTN(bits=8, group_size="channel")
    assert by_name.short("int8").activations == "int8"  # type: ignore[attr-defined]
    for name in ("gptq", "awq4", "smoothquant"):
        with pytest.raises(ConfigError, match="needs calibration text: `infer quantize MODEL"):
            by_name.short(name)
    for name in ("rtn7", "q4_0", "rtn4-g", ""):
        with pytest.raises(ConfigError, match="is no method without calibration; use rtn8"):
            by_name.short(name)


def test_a_recipe_file() -> None:
    text = (
        b'{"layers.0.*": null, "layers.*.down": {"method": "rtn", "bits": 8},'
        b' "*": {"method": "nf4"}}'
    )
    recipe = by_name.recipe_of(text, "r.json", (64,))
    assert recipe.rules == (
        ("layers.0.*", None),
        ("layers.*.down", quant.RTN(bits=8, group_size=64)),
        ("*", quant.NF4()),
    )
    for wrong, message in (
        ("[]", r"holds \[\]; write an object of patterns"),
        ("{}", "holds {}; write an object of patterns"),
        ('{"a": 4}', "'a' has the rule 4; write null, or an object with \"method\""),
        ('{"a": {"bits": 4}}', "'a' has the rule {'bits': 4}; write null, or an object"),
        ('{"a": {"method": "nf4", "bits": 4}}', "r.json: 'a': bits does not go with nf4"),
    ):
        with pytest.raises(ConfigError, match=message):
            by_name.recipe_of(wrong.encode(), "r.json")
    with pytest.raises(WeightFormatError, match="has the key 'a' twice"):
        by_name.recipe_of(b'{"a": null, "a": null}', "r.json")


# ---- Calibration text ----------------------------------------------------------------------------


def _tokenizer(bos: bool) -> Tokenizer:
    return Tokenizer.from_tokenizer_json(
        tokenizer_json.byte_level(bos=bos).to_str(), config={"bos_token": "<|bos|>"}
    )


def test_sequences_are_spread_over_the_text() -> None:
    text = "".join(chr(97 + i % 26) for i in range(1000))
    plain = calibration.sequences(_tokenizer(False), text, num_tokens=30, seq_len=10)
    ids = _tokenizer(False).encode(text, add_bos=False)
    assert plain.tokens.dtype == np.int32
    first = [0, len(ids) // 10 // 3, 2 * (len(ids) // 10) // 3]
    np.testing.assert_array_equal(plain.tokens, [ids[10 * i : 10 * i + 10] for i in first])
    assert plain.text.split("\n")[0] == text[:10]
    front = calibration.sequences(_tokenizer(True), text, num_tokens=30, seq_len=10)
    assert (front.tokens[:, 0] == 262).all() and front.tokens.shape == (3, 10)
    np.testing.assert_array_equal(front.tokens[0, 1:], ids[:9])
    everything = calibration.sequences(_tokenizer(False), text, seq_len=100)
    assert everything.tokens.shape == (len(ids) // 100, 100)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 1}, "sequences have 1 tokens; use at least 2"),
        ({"num_tokens": 9, "seq_len": 10}, "9 calibration tokens hold no sequence of 10"),
        (
            {"num_tokens": 4000, "seq_len": 10},
            "x has 30 tokens, 3 sequences of 10, and at least 400",
        ),
        ({"seq_len": 40}, "x has 30 tokens, 0 sequences of 40"),
    ],
)
def test_too_little_text(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        calibration.sequences(_tokenizer(False), "x" * 30, what="x", **options)


# ---- Reports -------------------------------------------------------------------------------------


def test_a_report_counts_every_byte() -> None:
    params = _params()
    recipe = {
        "layers.0.down": None,
        "layers.*.down": quant.RTN(bits=8, group_size="channel"),
        "layers.*": quant.RTN(bits=4, group_size=32),
    }
    packed = infer.quantize(params, recipe)
    made = report(params, packed)
    assert made.stayed == {"float32": ["embed", "layers.0.down"]}
    assert made.packed["INT8"] == (1, 64 * 32, 64 * 32 + 2 * 32)
    weights = 2 * (2 * 32 * 32 + 2 * 16 * 32 + 2 * 64 * 32)
    assert made.packed["INT4-G32"] == (12, weights, weights // 2 + weights // 32 * 2)
    leaves = sum(x.nbytes for x in _leaves(packed))
    assert made.bytes_after == leaves
    assert made.num_weights == sum(x.size for x in _leaves(params))
    assert made.bits_per_weight_overall == pytest.approx(8 * leaves / made.num_weights)
    # What was packed before and is packed no further stays as it is.
    again = report(packed, infer.quantize(packed, {"embed": quant.NF4(group_size=32)}))
    assert len(again.stayed["INT4-G32"]) == 12 and list(again.packed) == ["NF4-G32-DQ"]


def _leaves(params: Params) -> list:
    import jax

    return jax.tree.leaves(params)


def test_paths_in_few_words() -> None:
    assert in_words(["embed", "lm_head"], 4) == "embed, lm_head"
    assert in_words([f"layers.{i}.down" for i in range(4)], 4) == "layers.*.down"
    some = [f"layers.{i}.{m}" for i in (0, 1, 3) for m in ("q", "k")]
    assert in_words(some, 4) == "layers.0-1.{q,k}, layers.3.{q,k}"
    whole = [f"layers.0.{m}" for m in ("q", "k", "v", "o", "gate", "up", "down")]
    assert in_words(whole, 4) == "layers.0.*"


def test_public_names() -> None:
    assert infer.quant is quant
    assert infer.quantize is infer.quantization.quantize
    for name in quant.__all__:
        assert getattr(quant, name).__name__ == name
    assert set(quant.__all__) <= set(dir(quant))
    with pytest.raises(AttributeError, match="has no attribute 'Gptq'"):
        quant.Gptq  # noqa: B018
    assert dataclasses.is_dataclass(quant.GPTQ) and json.dumps(repr(quant.GPTQ()))
