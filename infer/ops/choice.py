"""Which implementation an op runs: chosen by platform, compute capability, shape and dtype, or
forced by name; what was chosen can be asked for.

An op lists its forms.  With `implementation=None` on a GPU the kernels that the op prefers there
are tried in order, on a CPU the native operation; one that cannot do the shape, dtype or chip
raises NotImplementedError, and plain XLA, which can do all, comes last.  Where there is a GPU the
program keeps a form for either device until it is lowered, so that one for that machine's CPU is
right too.

A name forces: a form that cannot do it is an error that names op, shape, dtype and chip.  An op
that has no form of that name chooses as if none was given.  "jax_triton" is a Triton kernel written
by hand, without Pallas, where an op has one.  "interpret" runs the Pallas-Triton kernels on any
device, slowly, for tests.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from infer import native
from infer.errors import ConfigError
from infer.hardware import chip_of_kind, get_chip
from infer.jax_triton import packages

IMPLEMENTATIONS = ("xla", "native", "triton", "mosaic", "jax_triton", "interpret")

_AMPERE, _HOPPER = (8, 0), (9, 0)

Form = Callable[..., Any]


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU that a program may be lowered for."""

    kind: str
    capability: tuple[int, int] | None  # None where nobody knows

    @property
    def chip(self) -> str | None:
        """Its name in infer.hardware; None if it is not listed."""
        return chip_of_kind(self.kind)


@dataclass(frozen=True)
class Choice:
    """What one op ran, and why not what it would rather have run."""

    op: str
    implementation: str
    reason: str = ""


_recorded: contextvars.ContextVar[list[Choice] | None] = contextvars.ContextVar(
    "infer_choices", default=None
)


@contextlib.contextmanager
def recording() -> Iterator[list[Choice]]:
    """Collect the choices of all ops that are traced inside, in order, each once."""
    choices: list[Choice] = []
    token = _recorded.set(choices)
    try:
        yield choices
    finally:
        _recorded.reset(token)


def check_implementation(name: str | None) -> None:
    """Raise ConfigError if there is no implementation of this name."""
    if name is not None and (not isinstance(name, str) or name not in IMPLEMENTATIONS):
        raise ConfigError(
            f"implementation is {name!r}; there are {', '.join(map(repr, IMPLEMENTATIONS))}, "
            "and None chooses"
        )


def target_gpu() -> Gpu | None:
    """Return the GPU that programs traced now may be lowered for: the one that a mesh describes,
    else this machine's first; None on a machine without one.
    """
    described = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if described is not None:
        if described.platform not in ("gpu", "cuda"):
            return None
        chip = chip_of_kind(described.device_kind)
        known = get_chip(chip).compute_capability if chip else None
        return Gpu(described.device_kind, known)
    try:
        device = jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        return None
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    known = (int(major), int(minor or 0)) if major.isdigit() else None
    return Gpu(device.device_kind, known)


def choose(
    op: str,
    operands: Sequence[Any],
    *,
    xla: Form,
    kernels: Mapping[str, Form],
    preferred: Sequence[str],
    implementation: str | None,
) -> Any:
    """Run one form of an op on `operands`.

    Args:
        op: the op's name, for the record.
        operands: arrays (pytrees) that every form takes.
        xla: the plain form, which does everything.
        kernels: name -> form, of "native", "triton", "mosaic", "jax_triton", and "interpret".
        preferred: names to try on a GPU where none is forced, best first.
        implementation: the forced name, or None.

    Raises:
        NotImplementedError: the forced form cannot do this.
        ConfigError: there is no such implementation.
    """
    check_implementation(implementation)
    if implementation == "xla":
        return _run(op, "xla", "", xla, operands)
    if implementation in ("triton", "mosaic", "jax_triton"):
        _check_gpu(op, implementation)
    if implementation is not None and implementation in kernels:
        try:
            return _run(op, implementation, "", kernels[implementation], operands)
        except NotImplementedError as error:
            if implementation == "native":  # of which there is one, for the CPU
                raise
            gpu = target_gpu()
            raise NotImplementedError(f"{error}; on {gpu.kind if gpu else 'a CPU'}") from error
    gpu = target_gpu()
    if gpu is None or implementation == "interpret":
        if "native" in kernels and implementation != "interpret" and native.by_default():
            try:
                return _run(op, "native", "", kernels["native"], operands)
            except NotImplementedError as error:
                return _run(op, "xla", str(error), xla, operands)
        return _run(op, "xla", "no GPU" if gpu is None else "no such form", xla, operands)
    refusals = []
    for name in preferred:
        try:
            _check_gpu(op, name)
            form = kernels[name]
            y = lax.platform_dependent(*operands, cuda=form, default=xla)
        except NotImplementedError as error:
            refusals.append(str(error))
        else:
            record(Choice(op, name))
            return y
    return _run(op, "xla", "; ".join(refusals) or "measured equal or unmeasured", xla, operands)


def with_xla_gradient(kernel: Form, xla: Form) -> Form:
    """Return `kernel` with the gradient of the plain form, recomputed from the operands."""

    @jax.custom_vjp
    def run(*operands: Any) -> Any:
        return kernel(*operands)

    def forward(*operands: Any) -> Any:
        return kernel(*operands), operands

    def backward(operands: Any, gradient: Any) -> Any:
        return jax.vjp(xla, *operands)[1](gradient)

    run.defvjp(forward, backward)
    return run


def _check_gpu(op: str, implementation: str) -> None:
    gpu = target_gpu()
    if gpu is None:
        raise NotImplementedError(
            f"{op} in {implementation} needs an NVIDIA GPU, and JAX sees none here; "
            "implementation='interpret' runs the Triton kernels anywhere, slowly, None chooses"
        )
    if implementation == "mosaic" and gpu.capability != _HOPPER:
        raise NotImplementedError(
            f"{op} in mosaic needs a Hopper GPU (compute capability 9.0), not {gpu.kind} "
            f"({gpu.capability}); use 'triton', or None, which chooses"
        )
    if implementation == "mosaic":
        return
    if gpu.capability is not None and gpu.capability < _AMPERE:
        raise NotImplementedError(
            f"{op} in {implementation} needs compute capability 8.0, not {gpu.kind} "
            f"({gpu.capability}); use 'xla', or None, which chooses"
        )
    if implementation == "jax_triton" and (lack := packages.missing()):
        raise NotImplementedError(
            f"{op} in jax_triton: {lack}; or use 'triton', or None, which chooses"
        )


def _run(op: str, name: str, reason: str, form: Form, operands: Sequence[Any]) -> Any:
    y = form(*operands)
    record(Choice(op, name, reason))
    return y


def record(choice: Choice) -> None:
    """Note a choice for `recording`."""
    choices = _recorded.get()
    if choices is not None and choice not in choices:
        choices.append(choice)
