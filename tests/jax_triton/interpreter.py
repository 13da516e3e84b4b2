"""Kernels of `infer.jax_triton` in Triton's interpreter: NumPy on a CPU, without torch.

A program at a time, an operation at a time: right for tiny shapes alone.
"""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import infer
from infer.jax_triton import packages

# Triton reads this when it is first imported: from then on the process interprets all kernels.
os.environ["TRITON_INTERPRET"] = "1"

_DTYPES = {
    "float32": "fp32",
    "float16": "fp16",
    "int32": "i32",
    "uint32": "u32",
    "uint8": "u8",
}


LACK = packages.missing()
needs_triton = pytest.mark.skipif(LACK is not None, reason=str(LACK))


class _HostArray:
    """An array with what the interpreter asks of a torch tensor: it is its own host copy."""

    def __init__(self, data: np.ndarray) -> None:
        self.data, self.dtype = data, _DTYPES[str(data.dtype)]

    def data_ptr(self) -> int:
        return self.data.ctypes.data

    def cpu(self) -> "_HostArray":
        return self

    def untyped_storage(self) -> "_HostArray":
        return self

    def new_empty(self, *_: Any, **__: Any) -> "_HostArray":
        return _HostArray(self.data)

    def set_(self, *_: Any) -> None: ...
    def copy_(self, _: Any) -> None: ...
    def storage_offset(self) -> None: ...
    def size(self) -> None: ...
    def stride(self) -> None: ...


def _run(
    kernel: Any,
    *operands: jax.Array,
    name: str,
    grid: tuple[int, ...],
    out_shape: jax.ShapeDtypeStruct,
    num_warps: int,
    num_stages: int = 1,
    **constants: Any,
) -> jax.Array:
    """Do what `infer.jax_triton.kernel_call.kernel_call` does, in the interpreter."""
    poison = -77 if out_shape.dtype == jnp.int32 else np.nan  # shows what is not written
    out = np.full(out_shape.shape, poison, out_shape.dtype)
    arrays = [_HostArray(np.array(x, order="C")) for x in operands]
    kernel[grid](*arrays, _HostArray(out), **constants)
    return jnp.asarray(out)


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return a copy of the module infer.jax_triton.<name> whose kernels are interpreted."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        # Triton 3.6 takes int() of an array of one element, which NumPy 2.4 no longer does.
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())
        scope.set_attr(tensor, "__bool__", lambda self: bool(self.handle.data.all()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    path = Path(infer.__file__).parent / "jax_triton" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"interpreted_{name}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # where dataclasses look
    spec.loader.exec_module(module)
    module.kernel_call = _run
    if hasattr(module, "libdevice"):  # device code, which the interpreter has not
        import triton.language as tl

        # Looked up when called: only there Triton's own are interpreted.
        module.libdevice = SimpleNamespace(exp=lambda x: tl.exp(x), log=lambda x: tl.log(x))
    return module
