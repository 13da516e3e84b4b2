"""Loading, building, threads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from infer import native
from infer.errors import ConfigError
from infer.native import build


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_what_is_loaded() -> None:
    assert native.available() and native.why_not() == ""
    assert native.isa() in ("avx2", "avx512", "amx")
    assert native.num_threads() >= 1


REPORT = """
from infer import native
print(native.available(), native.isa(), native.num_threads(), native.why_not(), sep="|")
try:
    native.library()
except NotImplementedError as error:
    print(error)
"""


@pytest.mark.parametrize(
    "env,reason",
    [
        ({"INFER_NATIVE_LIBRARY": "/nowhere/native.so"}, "is not built; run python -m"),
        ({"INFER_NATIVE_LIBRARY": __file__}, "cannot be loaded"),
        ({"INFER_NATIVE_ISA": "sse"}, "INFER_NATIVE_ISA is 'sse'; it can be avx2, avx512 or amx"),
    ],
)
def test_why_it_is_not_available(env: dict[str, str], reason: str) -> None:
    first, second = python(REPORT, **env).stdout.splitlines()
    assert first.startswith("False|none|1|") and reason in first
    assert second.startswith("no native operations: ")


def test_a_library_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    whole = build.LIBRARY.read_bytes()
    assert not build.is_cut_short(build.LIBRARY)
    cut = tmp_path / "native.so"
    for size in (len(whole) - 1, len(whole) // 2, 4096, 64):
        cut.write_bytes(whole[:size])
        assert build.is_cut_short(cut) and not build.is_fresh(cut), size
    for size in (0, 4, 63):  # no ELF file to speak of: the loader says so
        cut.write_bytes(whole[:size])
        assert not build.is_cut_short(cut) and not build.is_fresh(cut), size
        first, _ = python(REPORT, INFER_NATIVE_LIBRARY=str(cut)).stdout.splitlines()
        assert first.startswith("False|none|1|") and "cannot be loaded" in first
    cut.write_bytes(whole[: len(whole) * 3 // 4])
    done = python(REPORT, INFER_NATIVE_LIBRARY=str(cut))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"False|none|1|{cut} is cut short; run python -m infer.native")
    cut.write_bytes(whole[:32] + b"\xff" * 32 + whole[64:])  # headers that lie
    assert build.is_cut_short(cut)


@pytest.mark.parametrize("text", ["abc", "0", "-1", "2abc", "1025", " 2", "9" * 5000, "\u0662"])
def test_threads_that_are_no_number(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("INFER_NUM_THREADS", text)
    with pytest.raises(ConfigError, match="it must be a number from 1 to 1024") as caught:
        native._check_num_threads()
    assert len(str(caught.value)) < 200


EVERYONE = """
from infer import native
for ask in (native.available, native.why_not, native.isa, native.num_threads, native.library):
    try:
        ask()
    except ValueError as error:
        print(error)
"""


def test_whoever_asks_is_told_that_threads_are_no_number() -> None:
    lines = python(EVERYONE, INFER_NUM_THREADS="2abc").stdout.splitlines()
    assert len(lines) == 5 and len(set(lines)) == 1
    assert lines[0].startswith("INFER_NUM_THREADS is '2abc'; it must be a number from 1 to 1024")


THREADS = """
import ctypes
from infer.native import build
print(ctypes.CDLL(str(build.LIBRARY)).infer_native_num_threads())
"""


@pytest.mark.parametrize(
    "text,count",
    [("1", 1), ("3", 3), ("1024", 1024)]
    + [(text, len(os.sched_getaffinity(0))) for text in ("", "0", "-1", "2abc", "1025", "9" * 99)],
)
def test_what_the_library_reads_by_itself(text: str, count: int) -> None:
    assert python(THREADS, INFER_NUM_THREADS=text).stdout == f"{count}\n"


@pytest.mark.parametrize("text", ["no", "false", "2"])
def test_a_switch_that_is_none(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("INFER_NATIVE", text)
    with pytest.raises(ConfigError, match=f"INFER_NATIVE is '{text}'; 0 leaves"):
        native.by_default()


def test_a_library_of_other_sources_is_refused(tmp_path: Path) -> None:
    stale = tmp_path / "native.so"
    stale.write_bytes(build.LIBRARY.read_bytes().replace(build.source_hash().encode(), b"0" * 16))
    assert not build.is_fresh(stale)
    assert "built from other sources" in python(REPORT, INFER_NATIVE_LIBRARY=str(stale)).stdout


def test_importing_infer_loads_nothing() -> None:
    code = "import infer, infer.native; print('_native' in open('/proc/self/maps').read())"
    assert python(code).stdout.strip() == "False"


def test_without_a_compiler_there_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "infer.native.build", "/tmp/never.so"],
        env={**os.environ, "CXX": "no-such-compiler"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(
        "native operations: not built: no C++ compiler: no-such-compiler not found"
    )
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_forked_child_has_threads_of_its_own() -> None:
    code = """
import os, warnings
warnings.simplefilter("ignore")
from infer.native.repack import repack
from tests.native.weights import random_weight
weight = random_weight("Q8_0", (4096, 256))
want = repack(weight).data
import numpy as np, ctypes
from infer import native
def again():
    out = np.zeros(want.shape, np.uint8)
    native.library().infer_native_repack(7, ctypes.c_void_p(weight.data.ctypes.data),
        ctypes.c_int64(weight.data.shape[1]), 4096, 256, ctypes.c_void_p(out.ctypes.data))
    return bool((out == wanted).all())
wanted = np.asarray(want)
for generation in range(2):
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status))
    if not again(): os._exit(3)
os._exit(42)
"""
    assert python(code, INFER_NUM_THREADS="3").returncode == 42
