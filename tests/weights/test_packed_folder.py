"""Quantised models on disk: what comes back is what was saved, bit for bit, and nothing half done
or half right is ever there.
"""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import infer
from infer import fingerprint, quant
from infer.errors import ConfigError, WeightFormatError
from infer.eval import overlap
from infer.model import Model
from infer.models.differences import differences
from infer.models.params import Params, random_params
from infer.quant.qarray import QArray
from infer.tokenizer import Tokenizer
from infer.weights.convert import convert
from infer.weights.folder import load_folder
from infer.weights.folder_summary import summarise_folder
from infer.weights.packed_folder import write_params
from infer.weights.safetensors import SafetensorsFile
from infer.weights.safetensors_writer import write_file
from tests.models import tiny, tiny_folder
from tests.models.test_families import CASES, from_hf, tensors
from tests.tokenizer import tokenizer_json

# One for each kind of part and of field in a format.
METHODS: dict[str, quant.Method] = {
    "int8 channel": quant.RTN(bits=8, group_size="channel"),
    "int3 tensor": quant.RTN(bits=3, group_size="tensor", scale_dtype="float32"),
    "int5 asymmetric": quant.RTN(bits=5, group_size=16, symmetric=False, scale_dtype="bfloat16"),
    "llm.int8": quant.LLMInt8(),
    "fp8": quant.FP8(activations="token"),
    "fp8 blocks": quant.FP8(granularity="block", activations="block"),
    "nf4": quant.NF4(group_size=16),
    "fp4": quant.NF4(group_size=16, double=False, levels="fp4"),
    "mxfp6": quant.MX(code="e3m2"),
    "nvfp4": quant.NVFP4(),
    "turned": quant.RTN(bits=4, group_size=16, activations="int4", hadamard=8),
}


def _tokenizer() -> Tokenizer:
    return Tokenizer.from_tokenizer_json(
        tokenizer_json.byte_level().to_str(), config={"eos_token": "<|im_end|>"}
    )


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return _tokenizer()


def _params(**changes: Any) -> Params:
    # Widths of 32 and 64, so that groups of 32 divide.
    fields = dict(vocab_size=268, num_tokens=268, intermediate_size=64, max_context=512)
    return random_params(tiny.llama_config(**(fields | changes)), seed=4)


def _leaves(params: Params) -> list[Any]:
    return jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, QArray))


def _assert_same(have: Params, want: Params) -> None:
    for a, b in zip(_leaves(have), _leaves(want), strict=True):
        assert type(a) is type(b)
        if isinstance(b, QArray):
            assert (a.format, a.shape) == (b.format, b.shape)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            assert (x.dtype, x.shape) == (y.dtype, y.shape)
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("name", METHODS)
def test_packed_weights_come_back_bit_for_bit(
    name: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    params = _params()
    method = METHODS[name]
    packed = infer.quantize(params, {"layers.*.down": None, "layers.*": method, "embed": method})
    infer.save(packed, tmp_path / "m", tokenizer=tokenizer)
    loaded = infer.load(tmp_path / "m")
    _assert_same(loaded.params, packed)
    text = "Hello <|im_end|> world"
    for special in (False, True):
        assert loaded.tokenizer.encode(text, parse_special=special) == tokenizer.encode(
            text, parse_special=special
        )


def test_orders_static_scales_and_blocks_of_gguf(tokenizer: Tokenizer, tmp_path: Path) -> None:
    params = _params(tied_embeddings=False)
    ids = np.random.default_rng(0).integers(0, 268, (4, 32)).astype(np.int32)
    recipe = {
        "layers.0.*": quant.GPTQ(group_size=16, act_order=True),
        "layers.1.*": quant.SmoothQuant(static=True),
    }
    packed = infer.quantize(params, recipe, ids)
    assert packed.layers[0].q.perm is not None and packed.layers[1].q.act_scale is not None
    blocks = QArray.create(
        jnp.asarray(np.random.default_rng(1).integers(0, 256, (268, 34), np.uint8)),
        infer.quant.Format(name="Q8_0", bits=8, group=32, block_bytes=34),
        (268, 32),
    )
    packed = dataclasses.replace(packed, lm_head=blocks)
    infer.save(packed, tmp_path / "m", tokenizer=tokenizer, calibration=ids)
    _assert_same(infer.load(tmp_path / "m").params, packed)
    said = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    assert said["calibration"]["num_tokens"] == 128 and said["calibration"]["of"] == "tokens"
    assert said["weights"]["lm_head.weight"] == "Q8_0"
    mark = overlap.calibration_of(tmp_path / "m")
    assert mark is not None and fingerprint.share_in(fingerprint.token_hashes(ids), mark) == 1


# Among them tensors that hold several weights (phi3, gpt2, gpt_neox), transposed ones (gpt2), rows
# in another order (glm4, cohere2), norms less one (gemma3), every kind of rotary scaling.
@pytest.mark.parametrize("case", CASES)
def test_every_family(case: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    params = from_hf(case)
    method = quant.RTN(bits=8, group_size="channel")
    packed = infer.quantize(params, {"layers.0.q": method, "layers.1.up": method})
    [path] = write_params(packed, tokenizer, tmp_path / "m")
    have = load_folder(tmp_path / "m", num_tokens=params.config.num_tokens)
    _assert_same(have, packed)
    assert not differences(params.config, have.config)
    # What stays in floats is the checkpoint's own tensor; one and a small number, less one, is
    # another small number.
    old, new = tensors(case), SafetensorsFile.open(path)
    common = [name for name in new.tensors if name in old]
    assert len(common) >= len(old) - 2
    atol = 1e-7 if "gemma" in case else 0
    for name in common:
        np.testing.assert_allclose(new.array(name), old[name], rtol=0, atol=atol)


def test_norms_far_from_one_come_back(tokenizer: Tokenizer, tmp_path: Path) -> None:
    config = dataclasses.replace(tiny.gemma3_config(), vocab_size=268, num_tokens=268)
    params = random_params(config, seed=2)
    odd = jnp.asarray(np.float32([1e-6, 0.1, 0.3, 1.7, 3.3, 1e5, 0, -0.7] * 4))
    params = dataclasses.replace(params, final_norm=odd)
    infer.save(params, tmp_path / "m", tokenizer=tokenizer)
    _assert_same(infer.load(tmp_path / "m").params, params)


def test_floats_are_written_in_the_narrowest_dtype_that_holds_them(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    params = _params()
    half = jax.tree.map(lambda x: x.astype(jnp.float16).astype(jnp.float32), params.layers[0].q)
    brain = params.layers[0].k.astype(jnp.bfloat16).astype(jnp.float32)
    layer = dataclasses.replace(params.layers[0], q=half, k=brain)
    params = dataclasses.replace(params, layers=(layer, params.layers[1]))
    infer.save(params, tmp_path / "m", tokenizer=tokenizer)
    with SafetensorsFile.open(tmp_path / "m" / "model.safetensors") as file:
        dtypes = {n.split(".")[-2]: t.dtype for n, t in file.tensors.items() if ".0." in n}
    assert (dtypes["q_proj"], dtypes["k_proj"], dtypes["v_proj"]) == ("F16", "BF16", "F32")
    _assert_same(infer.load(tmp_path / "m").params, params)


# ---- Whole or not at all -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packed() -> Params:
    return infer.quantize(_params(), quant.RTN(bits=4, group_size=16, symmetric=False))


def test_a_failure_half_way_leaves_nothing(
    packed: Params, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    def stop(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        infer.save(packed, tmp_path / "a" / "b", tokenizer=tokenizer, progress=stop)
    assert not list(tmp_path.iterdir())


KILLED = """
import sys, os
from pathlib import Path
from infer.weights.new_folder import new_folder
with new_folder(Path(sys.argv[1])) as scratch:
    (scratch / "config.json").write_text("{}")
    print(scratch, flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_save_left_goes_with_the_next_one(
    packed: Params, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    start = lambda to: subprocess.Popen(
        [sys.executable, "-c", KILLED, str(to)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    writers = [start(tmp_path / "m"), start(tmp_path / "m"), start(tmp_path / "other")]
    try:
        killed, alive, other = (Path(w.stdout.readline().strip()) for w in writers)  # type: ignore
        for dead in (writers[0], writers[2]):
            dead.kill()
            dead.wait()
        assert killed.is_dir()
        for path in (killed, alive):
            for read in (infer.load, summarise_folder):
                with pytest.raises(WeightFormatError, match="or that a save which was killed has"):
                    read(path)
        infer.save(packed, tmp_path / "m", tokenizer=tokenizer)
        left = {p.name for p in tmp_path.iterdir()}
        # Of a writer that lives, and of another folder's, nothing is touched.
        assert left == {"m", alive.name, other.name}
        assert (alive / "config.json").read_text() == "{}"
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()


def test_what_is_there_is_never_written_over(
    packed: Params, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(ConfigError, match="is not empty; name a new folder"):
        infer.save(packed, tmp_path, tokenizer=tokenizer)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]
    (tmp_path / "empty").mkdir()
    assert infer.save(packed, tmp_path / "empty", tokenizer=tokenizer)


def test_what_cannot_be_saved_is_refused(
    packed: Params, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    to = tmp_path / "m"
    with pytest.raises(ConfigError, match=r"pass tokenizer=model\.tokenizer"):
        infer.save(packed, to)
    with pytest.raises(ConfigError, match=r"calibration is float32\[2\]; pass the token ids"):
        infer.save(packed, to, tokenizer=tokenizer, calibration=np.zeros(2, np.float32))
    broken = dataclasses.replace(packed.layers[0].q, zero=None)
    layer = dataclasses.replace(packed.layers[0], q=broken)
    wrong = dataclasses.replace(packed, layers=(layer, packed.layers[1]))
    with pytest.raises(ConfigError, match=r"q_proj.weight: .*zero is missing"):
        infer.save(wrong, to, tokenizer=tokenizer)
    wrong = dataclasses.replace(packed, final_norm=packed.layers[0].q)
    with pytest.raises(ConfigError):
        infer.save(wrong, to, tokenizer=tokenizer)
    other = dataclasses.replace(packed.config, residual_scale=0.5)  # no Llama has that
    with pytest.raises(ConfigError, match=r"residual_scale 0\.5 would become 1\.0"):
        infer.save(dataclasses.replace(packed, config=other), to, tokenizer=tokenizer)
    assert not list(tmp_path.iterdir())


def test_a_model_is_saved_with_its_own_tokenizer(tmp_path: Path) -> None:
    model = infer.load(tiny_folder.write(tmp_path / "source"))
    packed = infer.quantize(model.params, quant.RTN(bits=4, group_size=16))
    ours = Model(params=packed, tokenizer=model.tokenizer, name="x", path=tmp_path)
    infer.save(ours, tmp_path / "m")
    loaded = infer.load(tmp_path / "m")
    assert loaded.tokenizer.chat_template == tiny_folder.TEMPLATE
    assert loaded.tokenizer.eos_ids == model.tokenizer.eos_ids
    assert loaded.tokenizer.bos_id == model.tokenizer.bos_id
    assert loaded.config == model.config


# ---- Hostile files -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(packed: Params, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("hostile") / "m"
    infer.save(packed, to, tokenizer=tokenizer)
    return to


Q = "model.layers.0.self_attn.q_proj.weight"


def _rewritten(folder: Path, to: Path, change: Any, say: Any = None) -> Path:
    """The folder with other tensors, and another form in both places that have it."""
    shutil.copytree(folder, to)
    with SafetensorsFile.open(folder / "model.safetensors") as file:
        arrays = {name: np.array(file.array(name)) for name in file.tensors}
        metadata = dict(file.metadata)
    change(arrays)
    config = json.loads((folder / "config.json").read_text())
    if say is not None:
        say(config["quantization_config"])
        form = {k: config["quantization_config"][k] for k in ("formats", "weights")}
        metadata["infer_quantization"] = json.dumps(form)
    write_file(to / "model.safetensors", arrays, metadata)
    (to / "config.json").write_text(json.dumps(config))
    return to


TENSORS = {
    "another dtype": (lambda a: a.update({f"{Q}.scale": a[f"{Q}.scale"].astype(np.float32)}),
                      rf"{Q}: .*scale is float32 \[32, 2\]; it must be float16 \[32, 2\]"),
    "another shape": (lambda a: a.update({f"{Q}.data": a[f"{Q}.data"][:, :8]}),
                      rf"{Q}: .*data is uint8 \[32, 8\]; it must be uint8 \[32, 16\]"),
    "a part is missing": (lambda a: a.pop(f"{Q}.zero") is None, rf"{Q}: .*zero is missing"),
    "no data": (lambda a: a.pop(f"{Q}.data") is None, rf"{Q}: data is missing"),
    "a part too many": (lambda a: a.update({f"{Q}.global_scale": np.float32(1)}),
                        rf"{Q}: .*global_scale has no place"),
    "an unknown part": (lambda a: a.update({f"{Q}.bias": np.zeros(1, np.float32)}),
                        "q_proj.weight.bias' belongs to no weight"),
    "floats and packed": (lambda a: a.update({Q: np.zeros((32, 32), np.float32)}),
                          "q_proj.weight' belongs to no weight"),
    "half a nested scale": (lambda a: a.update({f"{Q}.scale.codes": np.zeros((32, 2), np.uint8)}),
                            "scale is either one tensor, or codes, absmax and offset"),
    "a dtype JAX has not": (lambda a: a.update({f"{Q}.scale": np.zeros((32, 2), np.complex64)}),
                            f"{Q}: "),
    "an order that is not said": (lambda a: a.update({f"{Q}.perm": np.zeros(32, np.int32)}),
                                  rf"{Q}: .*perm has no place in this format"),
    "scales of NaN": (lambda a: a.update({f"{Q}.scale": np.full((32, 2), np.nan, np.float16)}),
                      f"{Q}.scale has scales that are NaN or infinite"),
    "a float weight is missing": (lambda a: a.pop("model.norm.weight") is None,
                                  "model.norm.weight is missing"),
    "a float weight of bytes": (lambda a: a.update({"model.norm.weight": np.zeros(32, np.uint8)}),
                                "model.norm.weight is U8, must be one of F64"),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_are_not_what_is_said(case: str, folder: Path, tmp_path: Path) -> None:
    change, message = TENSORS[case]
    path = _rewritten(folder, tmp_path / "m", change)
    with pytest.raises(WeightFormatError, match=message) as raised:
        infer.load(path)
    assert "\n" not in str(raised.value)
    with pytest.raises(WeightFormatError) as shown:
        summarise_folder(path)
    assert str(shown.value) == str(raised.value)


@pytest.mark.parametrize("name, code", [("mxfp6", 0xFF), ("nvfp4", 0x7F), ("nvfp4", 0xFF)])
def test_scales_in_a_byte_that_stands_for_nan(
    name: str, code: int, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    packed = infer.quantize(_params(), {"layers.0.q": METHODS[name]})
    infer.save(packed, tmp_path / "whole", tokenizer=tokenizer)

    def change(arrays: dict[str, Any]) -> None:
        arrays[f"{Q}.scale"][3, 0] = code

    path = _rewritten(tmp_path / "whole", tmp_path / "m", change)
    for read in (infer.load, summarise_folder):
        with pytest.raises(WeightFormatError, match=rf"{Q}.scale has scales that are NaN"):
            read(path)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda a, name: a.pop(name), "perm is missing; it must be int32"),
        (lambda a, name: a.update({name: np.zeros(32, np.int32)}), "perm is no order of the 32"),
    ],
)
def test_an_order_is_whole_and_there(
    change: Any, message: str, packed: Params, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    q = packed.layers[0].q
    format = dataclasses.replace(q.format, ordered=True)
    order = jnp.asarray(np.random.default_rng(0).permutation(32), jnp.int32)
    turned = dataclasses.replace(q, perm=order, format=format)
    layer = dataclasses.replace(packed.layers[0], q=turned)
    params = dataclasses.replace(packed, layers=(layer, *packed.layers[1:]))
    infer.save(params, tmp_path / "a", tokenizer=tokenizer)
    path = _rewritten(tmp_path / "a", tmp_path / "b", lambda a: change(a, f"{Q}.perm"))
    with pytest.raises(WeightFormatError, match=message):
        infer.load(path)
    with pytest.raises(WeightFormatError, match=message):
        summarise_folder(path)


def test_a_place_that_cannot_be_is_refused_first(
    packed: Params, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for place, message in (
        (tmp_path / "link", "is a link"),
        (tmp_path / "file" / "m", "file is a file"),
        (tmp_path / "a\0b", "NUL"),
        (tmp_path / ("n" * 300), "name a new folder"),
    ):
        with pytest.raises(ConfigError, match=message):
            infer.save(packed, place, tokenizer=tokenizer)
    infer.save(packed, tmp_path / ("n" * 250), tokenizer=tokenizer)  # as long as Linux takes


def _with(**fields: Any) -> Any:
    return lambda c: c["formats"]["INT4-G16-ASYM"].update(fields)


FORMS = {
    "bits": (_with(bits=7), "bits is 7; integers have 2, 3, 4"),
    "bits as text": (_with(bits="4"), "bits is '4'"),
    "bits of another code": (_with(code="nf4", bits=8, symmetric=True), "bits is 8, and nf4 has 4"),
    "code": (_with(code="e9m9"), "code is 'e9m9'; known are int, e4m3"),
    "group": (_with(group=-1), "group is -1, must be a count"),
    "a group of everything": (_with(group=1 << 60), "has group 1152921504606846976, and the"),
    "rows of everything": (_with(rows=1 << 60), "has rows 1152921504606846976, and the weight"),
    "scale_dtype": (_with(scale_dtype="int8"), "scale_dtype is 'int8'; known are 'float32'"),
    "activations": (_with(activations=["int8"]), "activations is .*; known are"),
    "symmetric": (_with(symmetric=1), "symmetric is 1, must be true or false"),
    "a float's zero point": (_with(code="nf4", bits=4), "only integers have a zero point"),
    "name": (_with(name="a\nb"), "name is .*, must be 1 to 80 printable characters"),
    "another field": (_with(pickle="x"), "a planar format has no 'pickle'"),
    "layout": (_with(layout="dense"), "layout is 'dense'"),
    "an unknown type": (
        lambda c: c["formats"].update({"INT4-G16-ASYM": {"layout": "blocks", "name": "Q9_Z"}}),
        "'Q9_Z' is no GGUF type that is decoded",
    ),
    "another type": (
        lambda c: c["formats"].update({"INT4-G16-ASYM": {"layout": "blocks", "name": "Q4_0"}}),
        "scale, zero has no place in Q4_0",
    ),
    "no such format": (lambda c: c["weights"].update({Q: "X"}), "has the format 'X', which is not"),
    "no such weight": (
        lambda c: c["weights"].update({"model.layers.9.x": "INT4-G16-ASYM"}),
        "'model.layers.9.x' is said to be packed, and this model has no such weight",
    ),
    "a vector": (
        lambda c: c["weights"].update({"model.norm.weight": "INT4-G16-ASYM"}),
        "model.norm.weight is said to be packed; only q, k, v",
    ),
    "formats": (lambda c: c.update(formats=[]), "formats and weights must be objects"),
    "a format": (lambda c: c["formats"].update(x=3), "format 'x': a format is 3, must be an"),
    "calibration": (lambda c: c.update(calibration="x"), "calibration is 'x'; it must have of"),
    "a calibration of nothing": (
        lambda c: c.update(calibration={"of": "text", "sha256": "0" * 64, "num_tokens": 0}),
        "calibration is {'of': 'text', .*; it must have of",
    ),
    "version": (lambda c: c.update(version=2), "has the version 2, and this version of"),
}  # fmt: skip


@pytest.mark.parametrize("case", FORMS)
def test_a_form_that_cannot_be(case: str, folder: Path, tmp_path: Path) -> None:
    say, message = FORMS[case]
    path = _rewritten(folder, tmp_path / "m", lambda a: None, say)
    with pytest.raises(WeightFormatError, match=message) as raised:
        infer.load(path)
    assert "\n" not in str(raised.value)
    with pytest.raises(WeightFormatError) as shown:
        summarise_folder(path)
    assert str(shown.value) == str(raised.value)


def test_files_of_two_models(folder: Path, tmp_path: Path) -> None:
    path = _rewritten(folder, tmp_path / "m", lambda a: None)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["weights"].pop(Q)
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightFormatError, match="name different packed weights or formats"):
        infer.load(path)
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightFormatError, match=rf"{Q} is missing"):
        infer.load(path)


def test_packed_weights_are_not_taken_for_numbers(folder: Path, tmp_path: Path) -> None:
    for target in (tmp_path / "a.gguf", tmp_path / "b"):
        with pytest.raises(WeightFormatError, match=r"are packed by infer\.quantize"):
            convert(folder, target, dtype="bfloat16")
    # As they are, bytes may be copied.
    convert(folder, tmp_path / "c")
    _assert_same(infer.load(tmp_path / "c").params, infer.load(folder).params)
