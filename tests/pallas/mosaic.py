"""How tests run Mosaic GPU kernels without a GPU: interpreted, races detected."""

import contextlib
from collections.abc import Iterator

import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from infer.pallas.mosaic_call import has_interpreter

needs_interpreter = pytest.mark.skipif(
    not has_interpreter(), reason="this version of jax has no interpreter of Mosaic GPU kernels"
)
# What the interpreter prints, and all that it does, when two accesses are not ordered.
RACE = "RACE DETECTED"


@contextlib.contextmanager
def detecting_races() -> Iterator[None]:
    """Interpret kernels with vector clocks; races are printed to stdout (see `RACE`)."""
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield
