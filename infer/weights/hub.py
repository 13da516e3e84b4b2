"""Models of a hub: "org/name" or "org/name@revision", fetched into the cache of huggingface_hub.

Only what is read here is fetched: JSON files, chat templates and safetensors.  The revision is
resolved once, and all files are of that commit.  What cannot be loaded (an architecture, a
quantisation, a repository with pickles only) is refused before its weights are fetched.  A fetch
that breaks off goes on where it stopped, and weights are checked by the hub's SHA-256.

Offline, or where the hub does not answer, a whole copy in the cache is used.  HF_ENDPOINT, HF_HOME,
HF_TOKEN and HF_HUB_OFFLINE mean what they mean everywhere.
"""

import hashlib
import importlib
import importlib.util
import inspect
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infer.errors import ConfigError, WeightFormatError
from infer.model_files import ModelFolder, parse_json
from infer.weights.folder_config import describe
from infer.weights.shards import INDEX, SINGLE

logger = logging.getLogger(__name__)

# Called as progress(step, bytes done, bytes in all).
Progress = Callable[[str, int, int], None]

# Files beside the weights that are read here.
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
)
TEMPLATES = "additional_chat_templates/"

_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")


def parse(name: str) -> tuple[str, str | None] | None:
    """Return the repository and the revision of "org/name@revision"; None if `name` is no id."""
    match = _ID.fullmatch(name)
    return None if match is None else (match[1], match[2])


def pull(name: str, *, revision: str | None = None, progress: Progress | None = None) -> Path:
    """Return the folder of a hub's model, fetching what the cache lacks.

    Args:
        name: "org/name" or "org/name@revision".
        revision: a branch, tag or commit; None: the one in `name`, else the default branch.
        progress: called with the step, the bytes done and the bytes in all.

    Raises:
        ConfigError: no such repository or revision, it may not be read, it cannot be loaded here,
            or huggingface_hub is not installed.
        ConnectionError: the hub does not answer and the cache has no whole copy.
        WeightFormatError: what came is not what the hub has.
    """
    repository, revision = _split(name, revision)
    hub = _library(repository)
    try:
        info = _info(hub, repository, revision)
    except ConfigError:
        raise
    except Exception as error:  # requests, httpx or OSError, as the library's version has it
        return _offline(hub, repository, revision, error)
    try:
        return _fetch(hub, repository, revision, info, progress)
    except (ConfigError, WeightFormatError):
        raise
    except Exception as error:
        gone = isinstance(error, hub.errors.EntryNotFoundError)
        if gone and not isinstance(error, hub.errors.LocalEntryNotFoundError):
            raise ConfigError(f"{repository}: {_line(error)}") from None
        raise ConnectionError(
            f"{repository} could not be fetched whole ({_line(error)}); run `infer pull"
            f" {repository}` again, it goes on where it stopped"
        ) from error


def cached(name: str, *, revision: str | None = None) -> Path | None:
    """Return the folder of a whole copy in the cache, or None."""
    repository, revision = _split(name, revision)
    if importlib.util.find_spec("huggingface_hub") is None:
        return None
    return _cached(_library(repository), repository, revision)


def _split(name: str, revision: str | None) -> tuple[str, str | None]:
    parsed = parse(name)
    if parsed is None:
        raise ConfigError(f"{name!r} is no hub id; give org/name or org/name@revision")
    if revision is not None and parsed[1] not in (None, revision):
        raise ConfigError(f"{name!r} names a revision, and revision={revision!r} another; give one")
    return parsed[0], revision or parsed[1]


def _library(repository: str) -> Any:
    try:
        hub = importlib.import_module("huggingface_hub")
        importlib.import_module("huggingface_hub.errors")
        return hub
    except ImportError:
        raise ConfigError(
            f"{repository} would come from a hub, and huggingface_hub is not installed; run"
            " `pip install 'infer[hf]'`, or give a folder or a .gguf file"
        ) from None


def _api(hub: Any) -> Any:
    # By name: the library reads HF_ENDPOINT only when it is imported.
    return hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT"))


def _info(hub: Any, repository: str, revision: str | None) -> Any:
    """Return what the hub says of a repository; ConfigError where asking again would not help."""
    errors = hub.errors
    try:
        return _api(hub).model_info(repository, revision=revision, files_metadata=True)
    except errors.GatedRepoError:
        raise ConfigError(
            f"{repository} is gated; accept its terms on the hub and set HF_TOKEN to a token of"
            " yours"
        ) from None
    except errors.RevisionNotFoundError:
        raise ConfigError(f"{repository} has no revision {revision!r}; see its branches") from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"the hub has no model {repository}, or it is private; check the name, or set HF_TOKEN"
        ) from None
    except errors.HFValidationError as error:
        raise ConfigError(f"{repository!r} is no hub id: {_line(error)}") from None


def _offline(hub: Any, repository: str, revision: str | None, error: Exception) -> Path:
    path = _cached(hub, repository, revision)
    if path is None:
        at = f" at {revision}" if revision else ""
        raise ConnectionError(
            f"the hub does not answer ({_line(error)}), and the cache has no whole copy of"
            f" {repository}{at}; run `infer pull {repository}` with a network, or give a folder"
        ) from error
    logger.warning("the hub does not answer: %s is taken from the cache", repository)
    return path


def _cached(hub: Any, repository: str, revision: str | None) -> Path | None:
    found = hub.try_to_load_from_cache(repository, "config.json", revision=revision)
    if not isinstance(found, str):
        return None
    folder = Path(found).parent
    try:
        whole = all((folder / name).exists() for name in _weights_of(ModelFolder(folder)))
    except WeightFormatError:
        return None
    return folder if whole else None


def _weights_of(folder: ModelFolder) -> list[str]:
    """Return the weight files that a folder should have; those of its index where it has one."""
    index = folder.json(INDEX)
    if index is None or folder.member(SINGLE) is not None:
        return [SINGLE]
    return _shards(index)


def _shards(index: Any) -> list[str]:
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    values = weight_map.values() if isinstance(weight_map, dict) else []
    return sorted({name for name in values if isinstance(name, str)})


def _fetch(
    hub: Any, repository: str, revision: str | None, info: Any, progress: Progress | None
) -> Path:
    """Fetch the small files, see whether the model can be loaded, and fetch its weights."""
    # By the revision's name, so that the cache knows it offline; the others by its commit.
    download = _api(hub).hf_hub_download
    first = Path(download(repository, "config.json", revision=revision))
    commit = first.parent.name
    if info.sha != commit:  # it moved since
        info = _info(hub, repository, commit)
    files = {s.rfilename: s for s in info.siblings}
    small = [n for n in files if n in SMALL_FILES or n.startswith(TEMPLATES)]
    single = [SINGLE] if SINGLE in files else []
    alone = [n for n in files if n.endswith(".safetensors") and "/" not in n]
    index = [INDEX] if INDEX in files and not single else []
    if not single and not index and len(alone) != 1:
        raise ConfigError(
            f"{repository} has no {SINGLE} and no {INDEX}; pickles are never read: look for a"
            " safetensors or GGUF version"
        )
    for name in [*small, *index]:
        download(repository, name, revision=commit)
    folder = ModelFolder(first.parent)
    describe(folder)
    weights = single or alone
    if index:
        path = folder.member(INDEX)
        assert path is not None
        weights = _shards(parse_json(path.read_bytes(), f"{repository}/{INDEX}"))
    weights = [name for name in weights if name in files]  # the reader lists those that are not
    total = sum(getattr(files[name], "size", None) or 0 for name in weights)
    done = 0

    def report(count: float) -> None:
        nonlocal done
        done += int(count)
        if progress is not None:
            progress("download", min(done, total), total)

    for name in weights:
        before = done
        if not isinstance(hub.try_to_load_from_cache(repository, name, revision=commit), str):
            path = Path(download(repository, name, revision=commit, **_bar(download, report)))
            _check(path, files[name])
        report(before + (getattr(files[name], "size", None) or 0) - done)
    return first.parent


def _bar(download: Callable[..., str], report: Callable[[float], None]) -> dict[str, Any]:
    """Return the options that make the library report its progress to us and draw nothing."""
    if "tqdm_class" not in inspect.signature(download).parameters:
        return {}
    base = importlib.import_module("huggingface_hub.utils").tqdm

    class Bar(base):
        """A bar that is not drawn."""

        def __init__(self, *args: Any, **options: Any):
            super().__init__(*args, **options | {"disable": True})
            report(options.get("initial") or 0)

        def update(self, n: float | None = 1) -> None:
            """Report `n` more bytes."""
            report(n or 0)

    return {"tqdm_class": Bar}


def _check(path: Path, sibling: Any) -> None:
    """Hold a file against the hub's SHA-256, where the hub has one; drop it if it differs."""
    lfs = getattr(sibling, "lfs", None)
    wanted = lfs.get("sha256") if isinstance(lfs, dict) else getattr(lfs, "sha256", None)
    if not wanted:
        return
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wanted:
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise WeightFormatError(
            f"{path.name} came with SHA-256 {found}, not the hub's {wanted}; nothing of it was kept"
        )


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
