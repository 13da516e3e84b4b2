"""The wheel: with the native library and a platform tag, or pure where it cannot be compiled."""

import base64
import hashlib
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import build_backend
from infer.native import build

ROOT = Path(build_backend.__file__).parent
TAG = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def pip(*arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    """Run pip without a network."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    environment = {**os.environ, "PIP_NO_INDEX": "1", **env}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def rows(wheel: zipfile.ZipFile) -> dict[str, tuple[str, str]]:
    """Return RECORD: name -> digest and size."""
    name = next(n for n in wheel.namelist() if n.endswith(".dist-info/RECORD"))
    lines = wheel.read(name).decode().splitlines()
    return {n: (digest, size) for n, digest, size in (line.rsplit(",", 2) for line in lines)}


def check_record(path: Path) -> None:
    """Every file has its row, and every row's digest and size are the file's."""
    with zipfile.ZipFile(path) as wheel:
        found = rows(wheel)
        assert sorted(found) == sorted(wheel.namelist())
        for name, (digest, size) in found.items():
            if name.endswith("/RECORD"):
                assert (digest, size) == ("", "")
                continue
            data = wheel.read(name)
            want = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert (digest, size) == (f"sha256={want}", str(len(data)))


def test_the_library_goes_into_a_pure_wheel(tmp_path: Path):
    pure = tmp_path / "infer-1-py3-none-any.whl"
    files = {
        "infer/__init__.py": b"pass\n",
        "infer-1.dist-info/WHEEL": b"Root-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(pure, "w") as wheel:
        record = [build_backend._record(name, data) for name, data in files.items()]
        for name, data in files.items():
            wheel.writestr(name, data)
        wheel.writestr(
            "infer-1.dist-info/RECORD", "\n".join([*record, "infer-1.dist-info/RECORD,,", ""])
        )
    library = tmp_path / "x.so"
    library.write_bytes(b"code")
    made = build_backend.add_library(pure, library)
    assert made.name == f"infer-1-{TAG}.whl"
    assert not pure.exists()
    check_record(made)
    with zipfile.ZipFile(made) as wheel:
        assert wheel.read("infer/native/_native.so") == b"code"
        assert wheel.read("infer/__init__.py") == b"pass\n"
        words = wheel.read("infer-1.dist-info/WHEEL").decode()
        assert words == f"Root-Is-Purelib: false\nTag: {TAG}\n"
        assert wheel.namelist()[-1] == "infer-1.dist-info/RECORD"


def test_a_setting_that_is_none_is_an_error():
    with pytest.raises(SystemExit, match="native='maybe'; it can be 'required' or 'no'"):
        build_backend.build_wheel("/nowhere", {"native": "maybe"})


def test_what_is_required_and_cannot_be_built_is_one_line(tmp_path: Path):
    code = "import build_backend; build_backend._build('required', build_backend.Path('x.so'))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "CXX": "/no/such/compiler"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("infer: native=required, and the CPU's native operations cannot")
    assert done.stderr.endswith("which installs without them, in plain XLA\n")


def test_headers_are_not_newer_than_jaxlibs():
    """A library of a newer FFI version would take JAX's whole CPU backend with it."""
    import jax.ffi

    def version(folder: Path) -> tuple[int, ...]:
        text = (folder / "xla/ffi/api/c_api.h").read_text()
        return tuple(
            int(x) for x in re.findall(r"#define XLA_FFI_API_(?:MAJOR|MINOR) (\d+)$", text, re.M)
        )

    mine, theirs = version(build.HEADERS), version(Path(jax.ffi.include_dir()))
    assert len(mine) == 2 and mine[0] == theirs[0] and mine <= theirs


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    code = "import build_backend, sys; print(build_backend.build_sdist(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    archive = folder / done.stdout.splitlines()[-1]
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def make_wheel(sources: Path, folder: Path, *options: str, **env: str) -> tuple[Path, str]:
    """Return the wheel and the build's log."""
    arguments = ("wheel", "-v", "--no-build-isolation", "--no-deps", *options, "-w", folder)
    done = pip(*arguments, sources, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel, done.stdout + done.stderr


def run_installed(wheel: Path, folder: Path, code: str) -> str:
    """Install the wheel in an environment of its own beside this one's packages; return what the
    code prints there.
    """
    python = folder / "venv/bin/python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    where = sysconfig.get_path("purelib", vars={"base": str(folder / "venv")})
    paths = [p for p in sys.path if p.endswith("-packages")]
    Path(where, "others.pth").write_text("\n".join(paths))
    done = pip("--python", python, "install", "--no-deps", "--force-reinstall", wheel)
    assert done.returncode == 0, done.stdout + done.stderr
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "INFER_NATIVE")}
    done = subprocess.run([python, "-c", code], env=env, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_wheel_with_the_library(sources: Path, tmp_path: Path):
    try:
        build.compiler()
    except build.BuildError as error:
        pytest.skip(str(error))
    if reason := build.unsupported():
        pytest.skip(reason)
    # The real compiler and flags, but for -O0 at the end: what is tested is the wheel.
    compiler = tmp_path / "c++"
    compiler.write_text(f'#!/bin/sh\nexec {shlex.join(build.compiler())} "$@" -O0\n')
    compiler.chmod(0o755)
    wheel, log = make_wheel(sources, tmp_path, "-C", "native=required", CXX=str(compiler))
    assert wheel.name.endswith(f"-{TAG}.whl")
    assert "without the CPU's native operations" not in log
    check_record(wheel)
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
    assert "infer/native/_native.so" in names
    kept = {f"infer/native/src/{p.name}" for p in build.SOURCES.iterdir() if p.suffix != ".so"}
    assert kept <= names  # to build it anew, and to tell a stale one
    assert not [n for n in names if n.startswith("tests/") or n.endswith(".pyc")]
    code = """
import jax.numpy as jnp, infer
from infer import native
from infer.native.paged_attention import dense_attention
print(infer.__file__)
print(native.available(), native.why_not())
print(dense_attention(*[jnp.ones((1, 3, 2, 16))] * 3, scale=1.0).sum())
"""
    where, there, total = run_installed(wheel, tmp_path, code).splitlines()
    assert where.startswith(str(tmp_path))
    assert (there.strip(), total) == ("True", "96.0")


@pytest.mark.slow
def test_without_a_compiler_the_wheel_is_pure(sources: Path, tmp_path: Path):
    nobody = {"CXX": "/no/such/compiler"}
    wheel, log = make_wheel(sources, tmp_path, **nobody)
    assert wheel.name.endswith("-py3-none-any.whl")
    lines = [x for x in log.splitlines() if "without the CPU's native operations" in x]
    assert len(lines) == 1 and "no C++ compiler: /no/such/compiler not found" in lines[0]
    with zipfile.ZipFile(wheel) as opened:
        assert not [n for n in opened.namelist() if n.endswith(".so")]
        assert {"infer/eval/corpora/te.txt", "infer/eval/corpora/README.md"} <= {*opened.namelist()}
    code = "from infer import native; print(native.available(), native.why_not())"
    assert "is not built" in run_installed(wheel, tmp_path, code)
    arguments = ("wheel", "--no-build-isolation", "--no-deps", "-C", "native=required")
    done = pip(*arguments, "-w", tmp_path / "none", sources, **nobody)
    assert done.returncode != 0
    assert "infer: native=required, and the CPU's native" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert not list(tmp_path.glob("none/*.whl"))


@pytest.mark.slow
def test_an_editable_install_builds_in_place(sources: Path, tmp_path: Path):
    """With a compiler that only says so: the real one has built the wheel above."""
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\nfor last; do :; done\necho made > "$last"\n')
    compiler.chmod(0o755)
    library = sources / "infer/native/_native.so"
    code = "import build_backend, sys; print(build_backend.build_editable(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=sources,
        env={**os.environ, "CXX": str(compiler)},
        capture_output=True,
        text=True,
    )
    try:
        assert done.returncode == 0, done.stderr
        assert library.read_text() == "made\n"
        assert done.stdout.splitlines()[-1].endswith("-py3-none-any.whl")
    finally:
        library.unlink(missing_ok=True)
