"""What packed bytes mean: every GGML type by number, and the law of planar formats.  No JAX in
here: a file is listed without it.

A format that is named here but has no decoder in `infer.quant.blocks` still has a size, so that a
file that holds it opens and lists.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Format:
    """What the bytes of a QArray mean: hashable, a part of the program.

    `group` weights along the input axis share one block of `block_bytes` bytes; `bits` is the width
    of one code.
    """

    name: str
    bits: int
    group: int
    block_bytes: int
    layout: str = "blocks"

    @property
    def bits_per_weight(self) -> float:
        """Bits a weight costs in memory, its share of scales and minima included."""
        return 8 * self.block_bytes / self.group

    def row_bytes(self, num_weights: int) -> int:
        """Return the bytes of a row of `num_weights` weights.

        Args:
            num_weights: Weights in the row, a multiple of `group`.

        Raises:
            ValueError: The row does not hold whole blocks.
        """
        if num_weights % self.group:
            raise ValueError(
                f"a row of {num_weights} weights is no whole number of {self.name} blocks of"
                f" {self.group}; use a row that is a multiple of {self.group}, or another format"
            )
        return num_weights // self.group * self.block_bytes


@dataclass(frozen=True, kw_only=True)
class PlanarFormat(Format):
    """Codes, scales and zero points in arrays of their own.

    A weight is `value(code) * scale`, with a zero point `(code - zero) * scale`.  The scales of
    [out, in] are [ceil(out / rows), ceil(in / group)].

    Args:
        group: weights along the input that share a scale; 0 is the whole row.
        rows: output rows that share a scale; 0 is all of them.
        code: what a code means: "int", or a key of `infer.quant.codes.LEVELS`.
        symmetric: integers only: the zero point is 2^(bits - 1), and not stored.
        scale_dtype: "float32", "float16", "bfloat16"; "e8m0" (a power of two in a byte); "e4m3"
            (beside one float32 for the whole matrix); "nested" (bytes under scales of their own).
        activations: what the product does to its input: "" nothing; "int8" or "e4m3": one scale a
            token; "int8_static" or "e4m3_static": one stored scale; "e4m3_128": one a token and 128
            inputs; "outliers": int8, with what is 6 and more left as it is (LLM.int8());
            "int4": one scale a token, of 0.9 of its largest magnitude.
        ordered: the columns stand in an order of their own, the weight's `perm`.
        rotated: inputs that a Hadamard matrix turns together (`infer.quant.hadamard`), 0 for none:
            the codes are those of the turned columns, and the product turns its input.
    """

    block_bytes: int = 0
    layout: str = "planar"
    rows: int = 1
    code: str = "int"
    symmetric: bool = True
    scale_dtype: str = "float16"
    activations: str = ""
    ordered: bool = False
    rotated: int = 0

    def grid(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the shape of the scales of a weight (out, in)."""
        rows, group = self.rows or shape[0], self.group or shape[1]
        return -(-shape[0] // rows), -(-shape[1] // group)

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a weight (out, in): codes, scales and zero points.

        An order of the columns (`perm`, 4 bytes an input) and a stored scale of activations come
        on top.
        """
        count = math.prod(self.grid(shape))
        scale = {"float32": 4, "float16": 2, "bfloat16": 2}.get(self.scale_dtype, 1) * count
        if self.scale_dtype == "e4m3":
            scale += 4
        if self.scale_dtype == "nested":
            scale += 4 * -(-count // NESTED_GROUP) + 4
        zero = 0 if self.symmetric else count
        return shape[0] * self.row_bytes(shape[1]) + scale + zero

    @property
    def bits_per_weight(self) -> float:
        """Bits a weight costs in memory; scales of whole rows and matrices count as nothing."""
        if not self.group:
            return float(self.bits)
        large = (self.group * 4096, self.group * 4096)
        return 8 * self.num_bytes(large) / math.prod(large)

    def row_bytes(self, num_weights: int) -> int:
        """Return the bytes of the codes of a row.

        Raises:
            ValueError: they do not fill whole bytes.
        """
        if self.bits != 8 and num_weights % 8:
            raise ValueError(
                f"a row of {num_weights} codes of {self.bits} bits fills no whole bytes; use a"
                " width that is a multiple of 8, or 8 bits"
            )
        return num_weights * self.bits // 8


# Scales under one scale of their own, where they are nested (bitsandbytes' double quantisation).
NESTED_GROUP = 256

# Type number -> (name, bits of a code, weights in a block, bytes of a block).
# Source: enum ggml_type in ggml.h and the block structs in ggml-common.h (ggml-org/ggml).
_TABLE: dict[int, tuple[str, int, int, int]] = {
    0: ("F32", 32, 1, 4),
    1: ("F16", 16, 1, 2),
    2: ("Q4_0", 4, 32, 18),
    3: ("Q4_1", 4, 32, 20),
    6: ("Q5_0", 5, 32, 22),
    7: ("Q5_1", 5, 32, 24),
    8: ("Q8_0", 8, 32, 34),
    9: ("Q8_1", 8, 32, 36),  # an intermediate of ggml's dot products, never meant for a file
    10: ("Q2_K", 2, 256, 84),
    11: ("Q3_K", 3, 256, 110),
    12: ("Q4_K", 4, 256, 144),
    13: ("Q5_K", 5, 256, 176),
    14: ("Q6_K", 6, 256, 210),
    15: ("Q8_K", 8, 256, 292),  # an intermediate as well
    16: ("IQ2_XXS", 2, 256, 66),
    17: ("IQ2_XS", 2, 256, 74),
    18: ("IQ3_XXS", 3, 256, 98),
    19: ("IQ1_S", 1, 256, 50),
    20: ("IQ4_NL", 4, 32, 18),
    21: ("IQ3_S", 3, 256, 110),
    22: ("IQ2_S", 2, 256, 82),
    23: ("IQ4_XS", 4, 256, 136),
    24: ("I8", 8, 1, 1),
    25: ("I16", 16, 1, 2),
    26: ("I32", 32, 1, 4),
    27: ("I64", 64, 1, 8),
    28: ("F64", 64, 1, 8),
    29: ("IQ1_M", 1, 256, 56),
    30: ("BF16", 16, 1, 2),
    34: ("TQ1_0", 2, 256, 54),
    35: ("TQ2_0", 2, 256, 66),
    39: ("MXFP4", 4, 32, 17),
    40: ("NVFP4", 4, 64, 36),
    41: ("Q1_0", 1, 128, 18),
}

GGML_TYPES: dict[int, Format] = {
    number: Format(name=name, bits=bits, group=group, block_bytes=block_bytes)
    for number, (name, bits, group, block_bytes) in _TABLE.items()
}

# Numbers that ggml gave out and took back; no current writer makes them.
REMOVED_GGML_TYPES: dict[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
