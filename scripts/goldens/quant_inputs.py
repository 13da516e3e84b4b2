"""The weights and activations that other packages quantise for tests/quant/test_goldens.py, and how
what they answer is kept.
"""

import json
import platform
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np


def weights() -> np.ndarray:
    """Return float32 [8, 256]: normal rows, and rows with what breaks careless quantisers."""
    rng = np.random.default_rng(20240501)
    w = (0.05 * rng.standard_normal((8, 256))).astype(np.float32)
    w[1, 64:128] = 0  # whole groups of nothing
    w[2, 40] = 8  # an outlier
    w[3] = np.resize(np.arange(-24, 25) / np.float32(4), 256)  # ties of every small float
    w[4] = (0.05 * rng.standard_t(2, 256)).astype(np.float32)  # heavy tails
    w[5] *= np.float32(1e-4)
    w[6] = np.abs(w[6])
    w[7] *= np.exp2(rng.integers(-12, 12, 256)).astype(np.float32)
    return w


def ragged() -> np.ndarray:
    """Return float32 [136, 160], which blocks of 128 x 128 do not divide."""
    rng = np.random.default_rng(7)
    grow = (1 + np.arange(136, dtype=np.float32) / 16)[:, None]
    return rng.standard_normal((136, 160)).astype(np.float32) * grow


def activations() -> np.ndarray:
    """Return float32 [6, 256], exact in float16: columns 3 and 200 have outliers, in every token
    the first, in two tokens the second.
    """
    rng = np.random.default_rng(11)
    x = rng.standard_normal((6, 256)).clip(-5, 5)
    x[:, 3] = [40, -33, 21, 60, -9, 12]
    x[[1, 4], 200] = [-17, 8]
    return x.astype(np.float16).astype(np.float32)


def gptq_case() -> tuple[np.ndarray, np.ndarray]:
    """Return a weight [16, 256] and the Hessian [256, 256] of correlated inputs, one of them dead:
    float32 both.
    """
    rng = np.random.default_rng(3)
    w = rng.standard_normal((16, 256)).astype(np.float32)
    mix = 0.1 * rng.standard_normal((256, 256)) + np.diag(np.exp(rng.standard_normal(256)))
    x = rng.standard_normal((600, 256)) @ mix
    x[:, 5] = w[:, 5] = 0  # and no scale sees its weights
    return w, (2 / 600 * x.T @ x).astype(np.float32)


def save(path: Path, packages: tuple[str, ...], arrays: dict[str, np.ndarray]) -> None:
    """Write the arrays, with the versions and the command that made them, to `path`."""
    made = {
        "packages": {name: version(name) for name in packages},
        "python": platform.python_version(),
        "command": "python " + " ".join(sys.argv),
    }
    np.savez_compressed(path, made=np.array(json.dumps(made)), **arrays)
    print(path, made["packages"], path.stat().st_size, "bytes")
