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


def planar_refusal(code: str, group: int, width: int, ordered: bool) -> str:
    """Return why the kernels cannot do a planar weight, or nothing.

    Args:
        code: what its codes mean: "int", or floats and levels.
        group: inputs that share a scale, 0 for all.
        width: inputs.
        ordered: whether its columns are in an order of their own.
    """
    unit = 32 if code == "int" else 2
    if ordered:
        return "its columns are in an order of their own (act_order without static_groups)"
    if width % 32:
        return f"the kernels take a width that is a multiple of 32, not {width}"
    if group % unit:
        return f"the kernels take groups that are a multiple of {unit}, not {group}"
    return ""
