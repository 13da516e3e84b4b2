"""Products of every quantised format with any number of rows, in one process:

    python -m tests.native.row_counts [COUNT ...]

Prints the instruction set, then a digest of each format's result for MOST rows.  For each COUNT the
result must be the first rows of that one, bit for bit; the exit code is 1 if one is not.
"""

import hashlib
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from infer import native
from infer.native.linear import gated_mlp, linear
from infer.native.repack import repack
from tests.native.weights import PACKED, random_rows, random_weight

MOST = 130
_OUT = 40  # three panels, the last half full


def _products() -> dict[str, Callable[[jax.Array], list[jax.Array]]]:
    """Return functions of x [rows, 512] by format."""
    products = {}
    for name in PACKED:
        width = 512 if name.endswith("_K") else 288  # blocks of 8 groups, and 8 + 1 groups
        weight = repack(random_weight(name, (_OUT, width)))
        gate, up = (repack(random_weight(name, (256, width), seed=s)) for s in (3, 4))
        down = repack(random_weight(name, (width, 256), seed=5))
        products[name] = lambda x, w=weight, mlp=(gate, up, down), width=width: [
            linear(x[:, :width], (w,))[0],
            gated_mlp(x[:, :width], *mlp, "silu"),
        ]
    return products


def digests(counts: list[int] | None = None) -> dict[str, str]:
    """Return a digest for each format, and "differs" for those where a count gives other bits."""
    x, products = jnp.asarray(random_rows(MOST, 512)), _products()
    run = jax.jit(lambda x: {name: f(x) for name, f in products.items()})
    every = jax.tree.map(np.asarray, run(x))
    found = {
        name: hashlib.sha256(b"".join(y.tobytes() for y in ys)).hexdigest()[:16]
        for name, ys in every.items()
    }
    for rows in counts or []:
        for name, ys in run(x[:rows]).items():
            if any(
                np.asarray(y).tobytes() != e[:rows].tobytes()
                for y, e in zip(ys, every[name], strict=True)
            ):
                found[name] = f"differs at {rows} rows"
    return found


if __name__ == "__main__":
    found = digests([int(count) for count in sys.argv[1:]])
    print(native.isa())
    for name, digest in found.items():
        print(name, digest)
    sys.exit(any("differs" in digest for digest in found.values()))
