"""AMX's products: the emulated tiles, then the library that is built on them.

Few machines have AMX.  Everywhere else the library is built once more with its tile instructions
in plain C++, and has to give the bits that AVX512 gives.
"""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from infer import native
from infer.native import build
from tests import native_library
from tests.native import bits, row_counts

# Around multiples of a tile's 16 rows and of a block's 64.
COUNTS = (1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 79, 80, 81, 112, 127, 128, 129)


def compiled(folder: Path, *flags: str) -> Path:
    """Return the driver as a shared library."""
    path = folder / "tiles.so"
    source = Path(__file__).with_name("tiles_driver.cc")
    flags = ("-std=c++17", "-O2", "-fPIC", "-shared", f"-I{build.SOURCES}", *flags)
    subprocess.run([*build.compiler(), *flags, str(source), "-o", str(path)], check=True)
    return path


@pytest.fixture(scope="module")
def emulated_tiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("emulated"), "-DINFER_EMULATE_TILES")


@pytest.fixture(scope="module")
def tiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("tiles"))


def tdpbssd(c: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return c [m, n] after TDPBSSD with a [m, 4k] and b [k, 4n].

    Source: Intel's manual, volume 2, TDPBSSD: for each m, k and n, DPBD adds the four products of
    the bytes of a.row[m].dword[k] and b.row[k].dword[n] to c.row[m].dword[n].
    """
    c = c.copy()
    with np.errstate(over="ignore"):
        for m in range(c.shape[0]):
            for k in range(b.shape[0]):
                for n in range(c.shape[1]):
                    for i in range(4):
                        c[m, n] += np.int32(a[m, 4 * k + i]) * np.int32(b[k, 4 * n + i])
    return c


def check_products(path: Path) -> None:
    """Compare one instruction's results with `tdpbssd`."""
    library = ctypes.CDLL(str(path))
    pointer = lambda x: ctypes.c_void_p(x.ctypes.data)
    rng = np.random.default_rng(0)
    for m, k, n in [(16, 8, 16), (16, 4, 16), (16, 16, 16), (3, 5, 7), (1, 1, 1), (2, 16, 1)]:
        for extreme in (False, True):
            x = rng.integers(-128, 128, (m, 64)).astype(np.int8)
            w = rng.integers(-128, 128, (k, 64)).astype(np.int8)
            sums = rng.integers(-(2**31), 2**31, (m, 16)).astype(np.int32)
            if extreme:  # sums beyond int32 wrap
                x[:], w[:], sums[:] = -128, -128, 2**31 - 1
            want = sums.copy()
            want[:, :n] = tdpbssd(sums[:, :n], x, w)
            stride = ctypes.c_int64(64)
            library.product(pointer(x), pointer(w), pointer(sums), m, k, n, stride)
            assert np.array_equal(sums, want), (m, k, n, extreme)


def test_emulated_product_is_that_of_intels_manual(emulated_tiles: Path) -> None:
    check_products(emulated_tiles)


def test_product_of_this_cpu_is_that_of_intels_manual(tiles: Path) -> None:
    if native.isa() != "amx":  # which has asked Linux for the tiles
        pytest.skip(f"the instruction set here is {native.isa()}, not amx")
    check_products(tiles)


@pytest.mark.parametrize(
    "what,message",
    [
        (0, "the palette is 1"),
        (1, "a tile has at most 16 rows"),
        (2, "shapes of a product do not fit"),
        (3, "a tile is used that is not configured"),
        (4, "a tile is used without a configuration"),
    ],
)
def test_emulation_refuses_what_the_cpu_does(emulated_tiles: Path, what: int, message: str) -> None:
    code = f"import ctypes; ctypes.CDLL({str(emulated_tiles)!r}).refused({what})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -6 and f"emulated tiles: {message}" in done.stderr


def test_instructions_are_those_that_a_disassembler_reads(tiles: Path) -> None:
    if shutil.which("objdump") is None:
        pytest.skip("there is no objdump")
    run = lambda *args: subprocess.run(["objdump", *args], capture_output=True, text=True).stdout
    version = re.search(r"(\d+)\.(\d+)", run("--version"))
    if version is None or (int(version[1]), int(version[2])) < (2, 35):
        pytest.skip("objdump knows AMX since binutils 2.35")
    listing = run("-d", "--no-show-raw-insn", str(tiles)).partition("<listing>:\n")[2]
    found = re.findall(r"\t((?:ldtile|tile|tdp).*)", listing.partition("\n\n")[0])
    assert [line.split("#")[0].split() for line in found] == [
        ["ldtilecfg", "(%rax)"],
        ["tileloadd", "(%rax,%rcx,1),%tmm0"],
        ["tileloadd", "(%rax,%rcx,1),%tmm5"],
        ["tileloadd", "(%rax,%rcx,1),%tmm7"],
        ["tilezero", "%tmm0"],
        ["tilezero", "%tmm7"],
        ["tdpbssd", "%tmm5,%tmm4,%tmm0"],
        ["tdpbssd", "%tmm7,%tmm6,%tmm3"],
        ["tdpbssd", "%tmm0,%tmm1,%tmm7"],
        ["tilestored", "%tmm0,(%rax,%rcx,1)"],
        ["tilestored", "%tmm7,(%rax,%rcx,1)"],
        ["tilerelease"],
    ]


# ---- The library --------------------------------------------------------------------------------


def python(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own."""
    return subprocess.run(
        [sys.executable, *args],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=600,
    )


REPORT = "from infer import native; print(native.isa(), native.why_not(), sep='|')"


@pytest.fixture(scope="module")
def emulated() -> dict[str, str]:
    """The environment of a process with the library whose tiles are emulated."""
    if reason := native_library.build_if_stale(emulate_tiles=True):
        pytest.skip(reason)
    env = {"INFER_NATIVE_LIBRARY": str(build.EMULATED), "INFER_NATIVE_ISA": ""}
    done = python("-c", REPORT, **env)
    if done.stdout.startswith("avx2"):
        pytest.skip("AMX's other kernels are AVX512's, and the best set here is avx2")
    assert done.stdout == "amx-emulated|\n", done.stderr
    return env


@pytest.fixture(scope="module")
def forced() -> dict[str, str]:
    """The environment of a process with this CPU's AMX."""
    env = {"INFER_NATIVE_ISA": "amx"}
    isa, _, reason = python("-c", REPORT, **env).stdout.strip().partition("|")
    if isa != "amx":
        pytest.skip(reason)
    return env


def check_row_counts(env: dict[str, str], isa: str, counts: tuple[int, ...]) -> None:
    """Compare any number of rows with what this process computes."""
    done = python("-m", "tests.native.row_counts", *map(str, counts), **env)
    first, *lines = done.stdout.splitlines()
    assert first == isa, done.stderr
    assert dict(line.split(" ", 1) for line in lines) == row_counts.digests()


def check_bits(env: dict[str, str], isa: str, threads: int) -> None:
    """Compare what `tests.native.bits` prints with what this process computes."""
    done = python("-m", "tests.native.bits", **env, INFER_NUM_THREADS=str(threads))
    first, *lines = done.stdout.splitlines()
    assert first == f"{isa} {threads}", done.stderr
    assert {name: digest for digest, name in (line.split(" ", 1) for line in lines)} == (
        bits.digests()
    )


def test_rows_have_the_same_bits_by_emulated_tiles(emulated: dict[str, str]) -> None:
    check_row_counts(emulated, "amx-emulated", COUNTS)


@pytest.mark.slow
def test_rows_have_the_same_bits_by_emulated_tiles_for_all_counts(emulated: dict[str, str]) -> None:
    check_row_counts(emulated, "amx-emulated", tuple(range(1, row_counts.MOST)))


@pytest.mark.parametrize("threads", [1, 3])
def test_operations_have_the_same_bits_by_emulated_tiles(
    emulated: dict[str, str], threads: int
) -> None:
    check_bits(emulated, "amx-emulated", threads)


def test_rows_have_the_same_bits_by_amx(forced: dict[str, str]) -> None:
    check_row_counts(forced, "amx", COUNTS)


@pytest.mark.parametrize("threads", [1, 3])
def test_operations_have_the_same_bits_by_amx(forced: dict[str, str], threads: int) -> None:
    check_bits(forced, "amx", threads)


def test_amx_that_computes_something_else_is_not_used(emulated: dict[str, str]) -> None:
    env = {**emulated, "INFER_EMULATE_WRONG_TILES": "1"}
    done = python("-c", REPORT, **env)
    assert done.stdout == "avx512|\n"
    reason = "AMX's products differ from AVX512's in the self-test"
    assert done.stderr.splitlines() == [f"infer: native operations do without AMX: {reason}"]
    asked = python("-c", REPORT, **{**env, "INFER_NATIVE_ISA": "amx-emulated"})
    assert asked.stdout == (
        "none|INFER_NATIVE_ISA is amx-emulated, and the best set here is avx512:"
        f" {reason}; unset it\n"
    )
    # Who asks for a lesser set gets it, and no line.
    lesser = python("-c", REPORT, **{**env, "INFER_NATIVE_ISA": "avx512"})
    assert (lesser.stdout, lesser.stderr) == ("avx512|\n", "")


def test_amx_asked_for_where_there_is_none() -> None:
    with open("/proc/cpuinfo") as file:
        if "amx_int8" in file.read():
            pytest.skip("this CPU has AMX for int8")
    done = python("-c", REPORT, INFER_NATIVE_ISA="amx")
    assert done.stdout.startswith("none|INFER_NATIVE_ISA is amx, and the best set here is ")
    assert done.stdout.endswith(("avx2; unset it\n", ": this CPU has no AMX for int8; unset it\n"))
