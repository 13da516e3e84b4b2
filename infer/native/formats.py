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
