import gguf
import pytest

from infer.quant.formats import GGML_TYPES, REMOVED_GGML_TYPES


@pytest.mark.parametrize("kind", list(gguf.GGMLQuantizationType), ids=lambda k: k.name)
def test_sizes_are_gguf_pys(kind):
    format = GGML_TYPES[int(kind)]
    assert format.name == kind.name
    if kind.name == "Q8_1":  # gguf-py keeps the size from when its scales were float32
        assert (format.group, format.block_bytes) == (32, 36)
    else:
        assert (format.group, format.block_bytes) == gguf.GGML_QUANT_SIZES[kind]


def test_no_number_is_both_known_and_removed():
    assert not GGML_TYPES.keys() & REMOVED_GGML_TYPES.keys()


def test_bits_per_weight_and_row_bytes():
    q4_k = GGML_TYPES[12]
    assert q4_k.bits_per_weight == 4.5
    assert q4_k.row_bytes(512) == 288
    with pytest.raises(ValueError, match="640 weights is no whole number of Q4_K blocks of 256"):
        q4_k.row_bytes(640)
