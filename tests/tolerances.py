"""How far two computations of the same thing may differ, by dtype and length of the sums in it."""

import numpy as np


def tolerance(dtype: str, reduction: int) -> dict[str, float]:
    """Return atol and rtol: a few units in the last place, growing with the root of the reduction's
    length.
    """
    eps = {"float32": 1.2e-7, "bfloat16": 7.8e-3, "float16": 9.8e-4}[dtype]
    bound = 4 * eps * float(np.sqrt(reduction))
    return {"atol": bound, "rtol": bound}
