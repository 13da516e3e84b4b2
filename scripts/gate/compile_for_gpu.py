"""Compile a function for a described GPU, with the compiler that runs on the real one.

JAX's CUDA plugin compiles ahead of time for a topology that a text file describes: Pallas-Triton,
Mosaic GPU and plain XLA go down to PTX, which `ptxas -v` assembles; so do kernels of jax-triton,
which Triton compiles and XLA only carries.  No driver and no GPU are needed, only the wheels
jax-cuda13-plugin and jax-cuda13-pjrt (no dependencies), ptxas (CUDA 13.0, on PATH or from the wheel
nvidia-cuda-nvcc) and, for the latter, jax-triton and triton.

Import this module before jax: it sets the environment that the plugin and Mosaic read.
"""

import atexit
import glob
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TARGETS = Path(__file__).parent / "targets"
# The arch-specific targets are what the compiler uses on the chips that have them.
ARCH = {
    "a100-80gb": "sm_80",
    "l4-24gb": "sm_89",
    "h200-141gb": "sm_90a",
    "b200-180gb": "sm_100a",
    "rtx-5060-8gb": "sm_120a",
}


def find_ptxas() -> str | None:
    """Return the path of ptxas: on PATH, or in NVIDIA's wheel; None if there is none."""
    if found := shutil.which("ptxas"):
        return os.path.realpath(found)
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(glob.glob(f"{folder}/*/bin/ptxas")):
            return path
    return None


def missing() -> str | None:
    """Return what this machine lacks for compiling, in words; None if nothing."""
    plugins = importlib.util.find_spec("jax_plugins")  # of a submodule it raises without a parent
    if plugins is None or importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        return "the wheels jax-cuda13-plugin and jax-cuda13-pjrt are not installed"
    return None if find_ptxas() else "there is no ptxas, on PATH or from nvidia-cuda-nvcc"


# Of this process, made when it prepares to compile and gone with it.
_DUMP = os.path.join(tempfile.gettempdir(), f"gate-{os.getpid()}")
_MOSAIC = os.path.join(_DUMP, "mosaic")
_JAX_TRITON = os.path.join(_DUMP, "jax_triton")


def prepare_environment() -> None:
    """Set what the plugin, Mosaic and jax-triton read when they are imported; call before importing
    jax.
    """
    ptxas = find_ptxas()
    shutil.rmtree(_DUMP, ignore_errors=True)
    os.makedirs(_MOSAIC)
    atexit.register(shutil.rmtree, _DUMP, ignore_errors=True)
    os.environ["JAX_PLATFORMS"] = "cpu"  # the plugin then checks no driver and no cuDNN
    os.environ["MOSAIC_GPU_DUMP_TO"] = _MOSAIC
    os.environ["JAX_TRITON_DUMP_DIR"] = _JAX_TRITON
    os.environ.pop("TRITON_INTERPRET", None)  # with it Triton compiles nothing
    if ptxas:
        os.environ["PATH"] = os.path.dirname(ptxas) + os.pathsep + os.environ["PATH"]
        root = os.path.dirname(os.path.dirname(ptxas))
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_cuda_data_dir={root}"


@dataclass(frozen=True)
class CompiledKernel:
    """What ptxas and XLA say of one kernel; bytes of spills are stores + loads."""

    name: str
    arch: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    threads: int = 0


@dataclass
class CompiledProgram:
    """A program compiled for a described GPU."""

    chip: str
    lower_s: float
    compile_s: float
    text: str  # optimised HLO
    kernels: list[CompiledKernel] = field(default_factory=list)
    thunks: list[str] = field(default_factory=list)  # after XLA's passes, one a line
    alias_bytes: int = 0
    temp_bytes: int = 0

    def command_buffers(self) -> int:
        """Return how many command buffers (CUDA graphs) the program consists of."""
        return sum("kCommandBuffer" in line for line in self.thunks)


_meshes: dict[str, Any] = {}


def described_mesh(chip: str) -> Any:
    """Return the mesh of one described GPU.

    Raises:
        ValueError: no file describes `chip`.
    """
    from jax._src.pallas.triton import gpu_info
    from jax.experimental import topologies
    from jax.extend import backend

    path = TARGETS / f"{chip}.textproto"
    if not path.exists():
        known = ", ".join(sorted(p.stem for p in TARGETS.glob("*.textproto")))
        raise ValueError(f"no description of {chip!r}; there are {known}")
    if chip not in _meshes:
        topology = topologies.get_topology_desc(
            "", "cuda", target_config=path.read_text(), topology="1x1x1"
        )
        _meshes[chip] = topologies.make_mesh(topology, (1,), ("x",))
    # Mosaic asks JAX's default device for its architecture, and takes sm_90 where that has none;
    # Pallas-Triton asks it where it does not know the GPU's name.
    gpu_info.pxla = SimpleNamespace(get_default_device=lambda: _meshes[chip].devices.flat[0])
    backend.get_default_device = gpu_info.pxla.get_default_device
    return _meshes[chip]


def shared_memory_limit(chip: str) -> int:
    """Return the bytes of shared memory that one block may ask for."""
    text = (TARGETS / f"{chip}.textproto").read_text()
    found = re.search(r"shared_memory_per_block_optin: (\d+)", text)
    assert found, chip
    return int(found[1])


def compile_for(
    fn: Any,
    args: tuple[Any, ...],
    chip: str,
    *,
    donate: tuple[int, ...] = (),
    options: Mapping[str, Any] | None = None,
) -> CompiledProgram:
    """Lower, compile and assemble `fn` for `chip`.

    Args:
        fn: a function of arrays.
        args: pytrees of ShapeDtypeStruct.
        chip: a name of `ARCH`.
        donate: positions of donated arguments.
        options: XLA's compiler options.

    Raises:
        RuntimeError: ptxas refuses a kernel, or a kernel's code was not seen.
    """
    import jax

    mesh = described_mesh(chip)
    placed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    args = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=placed), args)
    # A fresh folder: code of an earlier compilation must not pass for this one's.
    folder = tempfile.mkdtemp(dir=_DUMP)
    before = _dumped()
    start = time.perf_counter()
    with jax.set_mesh(mesh):
        lowered = jax.jit(fn, donate_argnums=donate).lower(*args)
    middle = time.perf_counter()
    dump = {"xla_dump_to": folder, "xla_dump_emitter_re": "^ptx$", "xla_dump_hlo_as_text": True}
    compiled = lowered.compile(compiler_options={**dump, **(options or {})})
    end = time.perf_counter()
    memory = compiled.memory_analysis()
    program = CompiledProgram(
        chip=chip,
        lower_s=middle - start,
        compile_s=end - middle,
        text=compiled.as_text(),
        thunks=_thunks(folder),
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
    )
    _assemble(program, folder, sorted(_dumped() - before))
    shutil.rmtree(folder)
    return program


def _dumped() -> set[str]:
    """Return the files that Mosaic and jax-triton have left: they choose their folders."""
    return set(glob.glob(f"{_MOSAIC}/*") + glob.glob(f"{_JAX_TRITON}/*/*"))


def _thunks(folder: str) -> list[str]:
    """Return the thunks after XLA's passes (which make command buffers), else as emitted."""
    found = glob.glob(f"{folder}/*thunk_sequence*.txt")
    after = [path for path in found if "after_thunk_passes" in path]
    return [line.rstrip() for path in (after or found)[:1] for line in open(path)]


def _assemble(program: CompiledProgram, folder: str, dumped: list[str]) -> None:
    arch = ARCH[program.chip]
    emitted = [
        line
        for path in glob.glob(f"{folder}/*thunk_sequence.txt")
        if "after" not in os.path.basename(path)
        for line in open(path)
    ]
    for path in sorted(glob.glob(f"{folder}/*.ptx")):
        for kernel in _ptxas(path, arch):
            program.kernels.append(_with_launch(kernel, emitted))
    for path in dumped:
        if path.endswith(".ptx"):
            mosaic = os.path.dirname(path) == _MOSAIC
            program.kernels += (_mosaic_kernel if mosaic else _jax_triton_kernel)(path, arch)
    _check_seen(program)
    _check_mosaic_arch(program, dumped)


def _ptxas(path: str, arch: str) -> list[CompiledKernel]:
    ptxas = find_ptxas()
    assert ptxas
    done = subprocess.run(
        [ptxas, "-v", f"-arch={arch}", path, "-o", f"{path}.cubin"], capture_output=True, text=True
    )
    log = done.stderr + done.stdout
    if done.returncode:
        raise RuntimeError(f"ptxas refuses {os.path.basename(path)} for {arch}: {log[-800:]}")
    entry = re.compile(
        r"Compiling entry function '([^']+)' for '([^']+)'(.*?)Used (\d+) registers([^\n]*)", re.S
    )
    kernels = []
    for name, target, middle, registers, rest in entry.findall(log):
        if target != arch:
            raise RuntimeError(f"{name} was assembled for {target}, not for {arch}")
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", middle)
        shared = re.search(r"(\d+) bytes smem", rest)
        kernels.append(
            CompiledKernel(
                name=name,
                arch=target,
                registers=int(registers),
                spill_bytes=int(spills[1]) + int(spills[2]) if spills else 0,
                shared_bytes=int(shared[1]) if shared else 0,
            )
        )
    return kernels


def _with_launch(kernel: CompiledKernel, thunks: list[str]) -> CompiledKernel:
    """Return `kernel` with the threads and the dynamic shared memory of its launch."""
    launch = re.compile(
        rf"\b{re.escape(kernel.name)} grid: .*?threads: \[(\d+), (\d+), (\d+)\]"
        r"\s+shared_memory: (\d+) bytes"
    )
    for line in thunks:
        if found := launch.search(line):
            x, y, z, shared = map(int, found.groups())
            return CompiledKernel(
                kernel.name,
                kernel.arch,
                kernel.registers,
                kernel.spill_bytes,
                max(shared, kernel.shared_bytes),
                x * y * z,
            )
    return kernel


def _mosaic_kernel(path: str, arch: str) -> list[CompiledKernel]:
    resources = path.removesuffix(".ptx") + ".resources.txt"
    shared = 0
    if os.path.exists(resources):
        found = re.search(r"smem_scratch_bytes=(\d+)", open(resources).read())
        shared = int(found[1]) if found else 0
    return [
        CompiledKernel(k.name, k.arch, k.registers, k.spill_bytes, max(shared, k.shared_bytes))
        for k in _ptxas(path, arch)
    ]


def _jax_triton_kernel(path: str, arch: str) -> list[CompiledKernel]:
    """Assemble what Triton compiled; its shared memory stands beside, its threads in the code."""
    beside = open(path.removesuffix(".ptx") + ".compile_info").read()
    shared = re.search(r"shared_mem_bytes: (\d+)", beside)
    threads = re.search(r"\.reqntid (\d+)", open(path).read())
    assert shared and threads, path
    return [
        CompiledKernel(k.name, k.arch, k.registers, k.spill_bytes, int(shared[1]), int(threads[1]))
        for k in _ptxas(path, arch)
    ]


def _check_seen(program: CompiledProgram) -> None:
    """A custom call whose code was never dumped was never assembled: that is no pass."""
    names = [kernel.name for kernel in program.kernels]
    for target, what in (
        ("mosaic_gpu_v2", "Mosaic"),
        ("__gpu$xla.gpu.triton", "Triton"),
        ("triton_kernel_call", "jax-triton"),
    ):
        calls = program.text.count(f'custom_call_target="{target}"')
        if calls and not names:
            raise RuntimeError(f"{calls} {what} calls, and no code of a kernel was dumped")


def _check_mosaic_arch(program: CompiledProgram, dumped: list[str]) -> None:
    major, minor = re.findall(
        r"\b(?:major|minor): (\d+)", (TARGETS / f"{program.chip}.textproto").read_text()
    )[:2]
    for path in dumped:
        if path.endswith("before_layout_inference.txt"):
            found = re.findall(r"mosaic_gpu.arch_m(?:ajor|inor) = (\d+)", open(path).read())
            if found and found != [major, minor]:
                raise RuntimeError(f"lowered for sm {found}, not for {program.chip}")
