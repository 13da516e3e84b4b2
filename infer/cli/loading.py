"""Loading for the commands that run a model: compilation cache, download, progress, time taken."""

import os
import time
from pathlib import Path
from typing import Any

from infer import native
from infer.cli.implementation import say_what_is_missing
from infer.cli.progress import progress_bars
from infer.errors import ConfigError
from infer.weights import bundled, hub


def use_compilation_cache() -> None:
    """Let compiled programs outlive the process; to be called before jax is imported.

    The user's own JAX_COMPILATION_CACHE_DIR wins; INFER_NO_COMPILE_CACHE=1 turns this off.
    """
    if os.environ.get("INFER_NO_COMPILE_CACHE") == "1":
        return
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(bundled.cache_dir() / "xla"))
    # JAX's default of one second would leave most programs of a small model out.
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")


def load_model(
    model: str,
    dtype: str | None = None,
    packed: bool | None = None,
    implementation: str | None = None,
) -> tuple[Any, float]:
    """Return the loaded model and the seconds it took, a download not counted.

    Where native operations are missing that could be had, one line on standard error says so.

    Args:
        model: what the user named.
        dtype: of `infer.load`.
        packed: of `infer.load`.  Where another implementation than "native" is forced, which cannot
            read the native operations' weights, None is False, and True keeps a GGUF file's blocks.
        implementation: what will run it, or None.

    Raises:
        NotImplementedError: "native" is forced, and there are no native operations.
        ConfigError: weights of a folder are to be packed for an implementation that cannot read
            them.
    """
    import infer

    form: bool | str | None = packed
    if implementation == "native":
        if reason := native.why_not():
            raise NotImplementedError(f"--implementation native: {reason}")
    elif implementation is None:
        say_what_is_missing()
    else:
        form = _packed_for(implementation, model) if packed else False
    with progress_bars() as update:
        if model in bundled.known_models():
            bundled.pull(model, progress=update)
        elif not Path(model).expanduser().exists() and hub.parse(model) is not None:
            model = str(hub.pull(model, progress=update))
        start = time.perf_counter()
        options: dict[str, Any] = {"packed": form}
        if update is not None:
            options["progress"] = lambda done, total: update("load", done, total)
        loaded = infer.load(model, dtype=dtype, **options)
    return loaded, time.perf_counter() - start


def _packed_for(implementation: str, model: str) -> str:
    """Return the form of packed weights that another implementation than "native" reads."""
    path = Path(model).expanduser()
    hub_id = not path.exists() and hub.parse(model) is not None and path.suffix != ".gguf"
    if model not in bundled.known_models() and (path.is_dir() or hub_id):
        raise ConfigError(
            f"--packed with --implementation {implementation}: {model} is a folder, whose weights "
            "only native operations read packed; leave one of the two options out"
        )
    return "blocks"
