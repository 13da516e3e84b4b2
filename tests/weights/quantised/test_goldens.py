"""One matrix as compressed-tensors and bitsandbytes store it: what we decode is what they decode
(scripts/goldens/quant_layouts.py made the file; it holds versions and command under `made`).
"""

import functools
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.weights.quantised import layouts
from tests.weights.quantised.test_translate import decoded, matrix_of

_DATA = Path(__file__).parents[2] / "data" / "quant" / "layouts.npz"
_INT4 = layouts.group({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32})
_BNB: dict[str, Any] = {"quant_method": "bitsandbytes"}
# Case -> (configuration, relative error).
CASES: dict[str, tuple[dict[str, Any], float]] = {
    "pack-quantized": ({**_INT4, "format": "pack-quantized"}, 0),
    "pack-quantized zero": ({**_INT4, "format": "pack-quantized"}, 0),
    "int-quantized": ({**_INT4, "format": "int-quantized"}, 0),
    "int-quantized zero": ({**_INT4, "format": "int-quantized"}, 0),
    "float-quantized": ({**_INT4, "format": "float-quantized"}, 0),
    "nvfp4-pack-quantized": (
        {**_INT4, "format": "nvfp4-pack-quantized"},
        4e-3,
    ),  # they decode it to bfloat16
    "nf4": (_BNB, 0),
    "nf4 double": (_BNB, 0),
    "fp4": (_BNB, 0),
    "int8": (_BNB, 2e-3),  # they decode it to float16
}


@functools.cache
def _golden() -> dict[str, np.ndarray]:
    with np.load(_DATA) as file:
        return dict(file)


@pytest.mark.parametrize("case", CASES)
def test_decoded_as_the_library_decodes_it(case: str) -> None:
    config, error = CASES[case]
    dtypes = json.loads(str(_golden()["dtypes"]))
    tensors = {}
    for name, values in _golden().items():
        if name.startswith(f"{case}/") and not name.endswith("/="):
            fp8 = dtypes[name] == "float8_e4m3fn"
            values = values.view(ml_dtypes.float8_e4m3fn) if fp8 else values
            tensors[name.partition("/")[2]] = values
    have = decoded(matrix_of(tensors, **config))
    np.testing.assert_allclose(have, _golden()[f"{case}/="], rtol=error, atol=0)
