"""Serving shapes of each kernel: what the gate compiles, the GPU check runs, the benchmarks time.

One file a kernel, each with `CASES`.  Nothing here needs more than jax, numpy and infer.
"""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

# Chips of the gate (names of infer.hardware).  Triton forms serve all of them.
CHIPS = ("a100-80gb", "l4-24gb", "h200-141gb", "b200-180gb", "rtx-5060-8gb")


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Block sizes to try: `run(sizes)` is the kernel with them, `key` names the best in
    infer/pallas/tuned/<chip>/<kernel>.json, and `fields` what is written there of them (None: all).
    """

    key: str
    sizes: tuple[Any, ...]
    run: Callable[[Any], Callable[..., Any]]
    fields: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    """One kernel at one shape.

    `make(key)` draws the arguments (a pure function: `jax.eval_shape` of it costs nothing), `run`
    is the public function of the kernel with its static arguments bound, `reference` computes the
    same from the same arguments in plain XLA.
    """

    kernel: str  # the file's name in infer/pallas
    form: str  # "triton" or "mosaic"
    shape: str  # in words, with the dtype: "llama-3-8b b32 ctx8192 bf16"
    make: Callable[[jax.Array], tuple[Any, ...]]
    run: Callable[..., Any]
    reference: Callable[..., Any]
    names: tuple[str, ...]  # of the kernels that the compiled program must contain
    flops: float  # of one call, all operations that the maths needs
    bytes: float  # of one call, each input read once and each output written once
    error: float = 1e-2  # allowed norm of the difference, relative to the reference's norm
    chips: tuple[str, ...] = CHIPS
    donate: tuple[int, ...] = ()
    compare: Callable[[jax.Array], jax.Array] = lambda x: x  # of each output, before comparing
    tuning: "Tuning | None" = None

    @property
    def name(self) -> str:
        """Return what identifies the case in tables."""
        return f"{self.kernel} {self.form} {self.shape}"


def all_cases(smoke: bool = False) -> tuple[KernelCase, ...]:
    """Return the cases of every kernel, in the order of the files' names; or one tiny case of each,
    for the interpreter.
    """
    files = sorted(m.name for m in pkgutil.iter_modules(__path__))
    modules = (importlib.import_module(f"{__name__}.{name}") for name in files)
    if smoke:
        return tuple(m.SMOKE for m in modules if hasattr(m, "SMOKE"))
    return tuple(case for module in modules for case in module.CASES)
