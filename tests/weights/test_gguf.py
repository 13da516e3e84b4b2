"""The GGUF reader on files that are as they should be."""

import os
import struct
import subprocess
import sys

import gguf
import numpy as np
import pytest

from infer.errors import WeightFormatError
from infer.models.rows import rope_row_order
from infer.quant import QArray, dequantize, permute_rows
from infer.quant.blocks import FORMATS
from infer.quant.formats import GGML_TYPES
from infer.weights.gguf import GGUFFile
from tests.cases import gguf_bytes as g

F32 = 0


def test_axes_are_in_numpys_order(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(g.gguf([g.tensor_info("a", [4, 2], F32, 0)], struct.pack("<8f", *range(8))))
    with GGUFFile.open(path) as file:
        info = file.tensors["a"]
        assert (info.name, info.shape, info.type_name) == ("a", (2, 4), "F32")
        assert (info.offset, info.nbytes) == (128, 32)
        assert file.array("a").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert file.raw("a").shape == (2, 16)
        assert (file.path, file.version, file.alignment) == (str(path), 3, 32)


def test_raw_is_a_view_that_outlives_the_file(tmp_path):
    path = tmp_path / "a.gguf"
    infos = [g.tensor_info("v", [3], F32, 0), g.tensor_info("s", [], F32, 32)]
    path.write_bytes(g.gguf(infos, struct.pack("<3f20xf", 1, 2, 3, 4)))
    with GGUFFile.open(path) as file:
        raw = file.raw("v")
        assert raw.shape == (1, 12) and not raw.flags.owndata and not raw.flags.writeable
        assert file.array("v").tolist() == [1, 2, 3]
        assert file.array("s").shape == () and file.array("s") == 4
    assert raw.view(np.float32).tolist() == [[1, 2, 3]]
    assert file.metadata["general.architecture"] == "llama"
    with pytest.raises(ValueError, match="is closed; read tensors inside"):
        file.raw("v")


def test_a_file_that_is_cut_while_it_is_open_is_an_error(tmp_path):
    path = tmp_path / "a.gguf"
    infos = [g.tensor_info("a", [3], F32, 0), g.tensor_info("b", [3], F32, 32)]
    path.write_bytes(g.gguf(infos, struct.pack("<3f20x3f", 1, 2, 3, 4, 5, 6)))
    with GGUFFile.open(path) as file:
        size = path.stat().st_size
        assert file.array("b").tolist() == [4, 5, 6]
        os.truncate(path, size - 1)
        assert file.array("a").tolist() == [1, 2, 3]  # which is there
        for read in (file.raw, file.array, lambda name: file.release_view(name, np.zeros(3))):
            with pytest.raises(
                WeightFormatError,
                match=rf"a\.gguf: has been cut to {size - 1} bytes while .* ends at byte {size};",
            ):
                read("b")


def test_every_kind_of_value():
    pairs = [
        g.pair("u8", g.UINT8, 200),
        g.pair("i8", g.INT8, -5),
        g.pair("u16", g.UINT16, 60000),
        g.pair("i16", g.INT16, -300),
        g.pair("u32", g.UINT32, 2**32 - 1),
        g.pair("i32", g.INT32, -(2**31)),
        g.pair("f32", g.FLOAT32, 0.5),
        g.pair("yes", g.BOOL, 1),
        g.pair("no", g.BOOL, 0),
        g.pair("text", g.STRING, "naïve \U0001f600"),
        g.pair("u64", g.UINT64, 2**64 - 1),
        g.pair("i64", g.INT64, -(2**63)),
        g.pair("f64", g.FLOAT64, 1e-300),
        g.pair("ints", g.ARRAY, (g.INT32, [-1, 2, 3])),
        g.pair("floats", g.ARRAY, (g.FLOAT32, [0.25, -1])),
        g.pair("bools", g.ARRAY, (g.BOOL, [1, 0, 1])),
        g.pair("texts", g.ARRAY, (g.STRING, ["a", "", "ü"])),
        g.pair("none", g.ARRAY, (g.STRING, [])),
        g.pair("deep", g.ARRAY, (g.ARRAY, [(g.UINT8, [1, 2]), (g.STRING, ["x"]), (g.UINT8, [])])),
    ]
    file = GGUFFile("memory", g.gguf(pairs=pairs))
    m = file.metadata
    assert {k: m[k] for k in list(m)[:13]} == {
        "u8": 200,
        "i8": -5,
        "u16": 60000,
        "i16": -300,
        "u32": 2**32 - 1,
        "i32": -(2**31),
        "f32": 0.5,
        "yes": True,
        "no": False,
        "text": "naïve \U0001f600",
        "u64": 2**64 - 1,
        "i64": -(2**63),
        "f64": 1e-300,
    }
    assert m["yes"] is True and type(m["u8"]) is int and type(m["f32"]) is float
    assert m["ints"].dtype == np.int32 and m["ints"].tolist() == [-1, 2, 3]
    assert m["floats"].dtype == np.float32 and m["floats"].tolist() == [0.25, -1]
    assert m["bools"].dtype == np.bool_ and m["bools"].tolist() == [True, False, True]
    assert m["texts"] == ["a", "", "ü"] and m["none"] == []
    deep = m["deep"]
    assert deep[0].tolist() == [1, 2] and deep[1] == ["x"] and deep[2].tolist() == []
    assert len(m) == 19 and "deep" in m and "shallow" not in m
    assert m.type_of("u8") == "uint8" and m.type_of("texts") == "array of string"
    with pytest.raises(KeyError):
        m["shallow"]


@pytest.fixture(scope="module")
def typed() -> GGUFFile:
    pairs = [
        g.pair("int", g.UINT32, 7),
        g.pair("float", g.FLOAT32, 0.5),
        g.pair("bool", g.BOOL, 1),
        g.pair("str", g.STRING, "x"),
        g.pair("ints", g.ARRAY, (g.INT32, [1, 2])),
        g.pair("floats", g.ARRAY, (g.FLOAT32, [0.5])),
        g.pair("strs", g.ARRAY, (g.STRING, ["a"])),
        g.pair("tokenizer.ggml.scores", g.ARRAY, (g.UINT8, [1, 2, 3, 4])),
    ]
    return GGUFFile("memory", g.gguf(pairs=pairs))


def test_accessors_return_what_fits(typed):
    assert typed.meta_int("int") == 7
    assert typed.meta_float("float") == 0.5
    assert typed.meta_float("int") == 7.0 and type(typed.meta_float("int")) is float
    assert typed.meta_bool("bool") is True
    assert typed.meta_str("str") == "x"
    assert typed.meta_ints("ints").tolist() == [1, 2]
    assert typed.meta_floats("floats").tolist() == [0.5]
    assert typed.meta_strs("strs") == ["a"]
    assert typed.meta_int("absent", 3) == 3
    assert typed.meta_str("absent", "d") == "d"
    assert typed.meta_strs("absent", []) == []


@pytest.mark.parametrize(
    ("accessor", "key", "found", "wanted"),
    [
        ("meta_int", "bool", "bool", "an integer"),
        ("meta_int", "float", "float32", "an integer"),
        ("meta_int", "ints", "array of int32", "an integer"),
        ("meta_float", "str", "string", "a number"),
        ("meta_float", "bool", "bool", "a number"),
        ("meta_bool", "int", "uint32", "a bool"),
        ("meta_str", "int", "uint32", "a string"),
        ("meta_strs", "str", "string", "an array of strings"),
        ("meta_strs", "ints", "array of int32", "an array of strings"),
        ("meta_ints", "floats", "array of float32", "an array of integers"),
        ("meta_ints", "strs", "array of string", "an array of integers"),
        ("meta_floats", "tokenizer.ggml.scores", "array of uint8", "an array of floats"),
    ],
)
def test_accessors_name_the_key_and_what_was_found(typed, accessor, key, found, wanted):
    with pytest.raises(WeightFormatError) as error:
        getattr(typed, accessor)(key)
    assert f"metadata '{key}' has the type {found} and must be {wanted}; " in str(error.value)
    with pytest.raises(WeightFormatError, match="has no metadata 'absent'"):
        getattr(typed, accessor)("absent")


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (g.pair("k", g.STRING, b"\xff"), "metadata 'k' is not UTF-8"),
        (g.pair("k", g.ARRAY, (g.STRING, ["ok", b"\xc3("])), "string 1 in metadata 'k' is not"),
        (g.pair("k", g.BOOL, 2), "metadata 'k' holds 2 as a bool, which is 0 or 1"),
        (g.pair("k", g.ARRAY, (g.BOOL, [1, 255])), "holds 255 as a bool"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_when_it_is_asked_for(item, message):
    file = GGUFFile("memory", g.gguf(pairs=[item]))
    with pytest.raises(WeightFormatError, match=message):
        file.metadata["k"]


def test_the_alignment_may_be_of_any_integer_type():
    data = g.gguf(
        [g.tensor_info("a", [2], F32, 0), g.tensor_info("b", [2], F32, 128)],
        struct.pack("<2f120x2f", 1, 2, 3, 4),
        [g.pair("general.alignment", g.UINT64, 128)],
        alignment=128,
    )
    assert GGUFFile("memory", data).array("b").tolist() == [3, 4]


@pytest.mark.parametrize("number", GGML_TYPES, ids=lambda n: GGML_TYPES[n].name)
def test_a_file_of_any_known_type_opens_and_lists(number):
    format = GGML_TYPES[number]
    info = g.tensor_info("w", [2 * format.group, 3], number, 0)
    file = GGUFFile("memory", g.gguf([info], b"\0" * (6 * format.block_bytes)))
    assert file.tensors["w"].type_name == format.name
    assert file.tensors["w"].shape == (3, 2 * format.group)
    assert file.raw("w").shape == (3, 2 * format.block_bytes)
    readable = format.name in FORMATS or format.name in ("I8", "I16", "I32", "I64", "F64")
    if readable:
        np.testing.assert_array_equal(file.array("w"), np.zeros((3, 2 * format.group)))
    else:
        with pytest.raises(WeightFormatError) as error:
            file.array("w")
        assert f"tensor 'w' is {format.name}, and decoded are F32" in str(error.value)
        assert "requantise it" in str(error.value)


def test_numbers_keep_their_dtype_unless_told():
    data = struct.pack("<2q", 2**40 + 1, -3)
    file = GGUFFile("memory", g.gguf([g.tensor_info("n", [2], 27, 0)], data))
    assert file.array("n").dtype == np.int64 and file.array("n").tolist() == [2**40 + 1, -3]
    assert file.array("n", np.float32).dtype == np.float32
    double = GGUFFile("m", g.gguf([g.tensor_info("n", [2], 28, 0)], struct.pack("<2d", 1e300, 2)))
    assert double.array("n").dtype == np.float32 and double.array("n").tolist() == [np.inf, 2]
    assert double.array("n", np.float64).tolist() == [1e300, 2]


def test_an_absent_tensor_is_named_beside_those_there():
    file = GGUFFile("m", g.gguf([g.tensor_info("a", [8], F32, 0)], b"\0" * 32))
    with pytest.raises(
        WeightFormatError, match="no tensor 'b'; of its 1 tensors the first are 'a'"
    ):
        file.array("b")
    with pytest.raises(WeightFormatError, match="no tensor 'b'"):
        file.raw("b")


def test_gguf_pys_own_writer_is_read(tmp_path):
    """A file of each quantised type that gguf-py can write, with strings beside it."""
    path = str(tmp_path / "a.gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", ["<s>", "▁a", "b"])
    writer.add_uint32("llama.block_count", 2)
    rng = np.random.default_rng(1)
    weights = {}
    for name in ("F32", "F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16"):
        kind = gguf.GGMLQuantizationType[name]
        packed = gguf.quants.quantize(rng.normal(size=(6, 64)).astype(np.float32), kind)
        weights[name] = gguf.quants.dequantize(packed, kind)
        is_float = name in ("F32", "F16")
        writer.add_tensor(name, packed, raw_dtype=None if is_float else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile.open(path) as file:
        assert file.meta_strs("tokenizer.ggml.tokens") == ["<s>", "▁a", "b"]
        assert file.meta_int("llama.block_count") == 2
        for name, want in weights.items():
            assert file.tensors[name].type_name == name
            np.testing.assert_array_equal(file.array(name), want)


def test_gemmas_norms_come_as_stored_and_its_head_is_absent():
    """The stored gain is 1 + w already; the container changes nothing."""
    infos = [
        g.tensor_info("output_norm.weight", [2], F32, 0),
        g.tensor_info("token_embd.weight", [2, 3], F32, 32),
    ]
    data = struct.pack("<2f24x6f", 1.5, 0.75, 1, 0, 0, 1, 1, 1)
    file = GGUFFile("m", g.gguf(infos, data, [g.pair("general.architecture", g.STRING, "gemma2")]))
    assert file.array("output_norm.weight").tolist() == [1.5, 0.75]
    assert file.array("token_embd.weight").tolist() == [[1, 0], [0, 1], [1, 1]]
    assert "output.weight" not in file.tensors


def test_rope_rows_of_one_head():
    assert rope_row_order(1, 8).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


def test_rope_rows_of_two_heads_stay_in_their_head():
    order = rope_row_order(2, 8).tolist()
    assert order == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]


def test_rope_rows_depend_on_the_number_of_heads():
    """k has one head of 8 here; the query's two would give 0, 2, 1, 3, 4, 6, 5, 7."""
    assert rope_row_order(2, 4).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_rope_rows_undo_the_converters_permutation():
    heads, width = 3, 16
    hf = np.arange(heads * width)
    stored = hf.reshape(heads, 2, width // 2).swapaxes(1, 2).reshape(-1)  # as the converter writes
    np.testing.assert_array_equal(stored[rope_row_order(heads, width)], hf)


def test_rope_rows_move_packed_rows_with_their_scales():
    packed = np.random.default_rng(2).integers(0, 0x3C, (16, 36), np.uint8)
    q = QArray.create(packed, FORMATS["Q4_0"], (16, 64))
    order = rope_row_order(2, 8)
    np.testing.assert_array_equal(dequantize(permute_rows(q, order)), dequantize(q)[order])


@pytest.mark.parametrize(("heads", "width"), [(0, 8), (1, 7), (2, 0)])
def test_rope_rows_need_pairs(heads, width):
    with pytest.raises(ValueError, match=f"{heads} heads of width {width} have no rotary pairs"):
        rope_row_order(heads, width)


def test_reading_and_writing_need_no_jax():
    code = "import sys, infer.weights.gguf_writer; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0


def test_a_header_of_many_tensors_opens_quickly(tmp_path):
    """As many tensors as are read at all; 0.5 s on an idle core."""
    path = tmp_path / "a.gguf"
    infos = [g.tensor_info(f"blk.{i}.ffn.weight", [8], F32, 32 * i) for i in range(1 << 17)]
    path.write_bytes(g.gguf(infos, bytes(32 << 17)))
    # In a process without the run-time type checks of tests.
    code = "import sys, time; from infer.weights.gguf import GGUFFile; t = time.process_time();"
    code += "file = GGUFFile.open(sys.argv[1]); print(time.process_time() - t, len(file.tensors))"
    done = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True, check=True
    )
    seconds, count = done.stdout.split()
    assert int(count) == 1 << 17
    assert float(seconds) < 1.5  # a loaded machine is slower
