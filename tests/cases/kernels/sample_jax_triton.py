"""The draw in the hand-written kernel: the cases of the Pallas form."""

import dataclasses

from jax import Array

from tests.cases.kernels import sample


def _run(*args: Array) -> Array:
    from infer.jax_triton.sample import sample as kernel  # imports triton

    return kernel(*args)


CASES = tuple(
    dataclasses.replace(case, form="jax_triton", run=_run, names=("sample_kernel",))
    for case in sample.CASES
)
