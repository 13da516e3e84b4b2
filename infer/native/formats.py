"""The formats of weights that have native kernels; no JAX."""

# Format name -> its number in gemm.h.
FORMATS = {
    "F32": 0,
    "F16": 1,
    "BF16": 2,
    "Q4_0": 3,
    "Q4_1": 4,
    "Q5_0": 5,
    "Q5_1": 6,
    "Q8_0": 7,
    "Q4_K": 8,
    "Q5_K": 9,
    "Q6_K": 10,
}
FLOAT_FORMATS = ("F32", "F16", "BF16")

# Planar formats: integers by bits, without and with a zero point; 16 levels; 8-bit floats.
INTEGERS = {2: 11, 3: 12, 4: 13, 5: 14, 6: 15, 8: 16}
INTEGERS_WITH_ZERO = {2: 17, 3: 18, 4: 19, 5: 20, 6: 21, 8: 22}
LEVELS, E4M3, E5M2 = 23, 24, 25


def planar_number(kind: int, span: int, half: bool) -> int:
    """Return what the library takes for a planar format.

    Args:
        kind: of the above.
        span: inputs that share a scale.
        half: whether scales are float16, else float32.
    """
    return kind | half << 8 | span << 16


# How integers have their activations rounded, by what their format says: in groups of 32, a scale a
# row, or one that is stored.  The numbers are those of gemm.h.
ROUNDINGS = {"": 0, "int8": 1, "int8_static": 2}


def planar_refusal(code: str, group: int, width: int, activations: str) -> str:
    """Return why the kernels cannot do a planar weight, or nothing.

    Args:
        code: what its codes mean: "int", or floats and levels.
        group: inputs that share a scale, 0 for all.
        width: inputs.
        activations: how the format rounds them.
    """
    if width % 32:
        return f"the kernels take a width that is a multiple of 32, not {width}"
    if code != "int":
        return f"the kernels take groups that are even, not {group}" if group % 2 else ""
    if group % 32 and group != 16:
        return f"the kernels take groups of 16 or a multiple of 32 integers, not {group}"
    if activations not in ROUNDINGS:
        return f"no kernel rounds activations to {activations} for integers"
    return ""
