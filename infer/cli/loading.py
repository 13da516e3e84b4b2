"""Loading for the commands that run a model: compilation cache, download, progress, time taken."""

import os
import sys
import time
from pathlib import Path
from typing import Any

from infer import native
from infer.cli.implementation import say_what_is_missing
from infer.cli.progress import progress_bars, tell_of_compiling
from infer.errors import ConfigError
from infer.progress import counting_bar
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
    *,
    decodable: bool = False,
    quantize: str | None = None,
    beside: bool = False,
) -> tuple[Any, float]:
    """Return the loaded model and the seconds it took, a download not counted.

    Where native operations are missing that could be had, one line on standard error says so.

    Args:
        model: what the user named.
        dtype: of `infer.load`.
        packed: of `infer.load`.  Where another implementation than "native" is forced, which cannot
            read the native operations' weights, None is False, and True keeps a GGUF file's blocks.
        implementation: what will run it, or None.
        decodable: the weights are to be quantised: a GGUF file's blocks, or floats, whatever
            `packed` says.
        quantize: a method's short name (`infer.quantization.by_name.short`) for the matrices of all
            layers, or None.
        beside: this is not the first model of the command: what is missing has been said.

    Raises:
        NotImplementedError: "native" is forced, and there are no native operations.
        ConfigError: weights of a folder are to be packed for an implementation that cannot read
            them.
    """
    import infer

    tell_of_compiling()
    form: bool | str | None = packed
    if implementation == "native":
        if reason := native.why_not():
            raise NotImplementedError(f"--implementation native: {reason}")
    elif implementation is None:
        if not beside:
            say_what_is_missing()
    else:
        form = _packed_for(implementation, model) if packed else False
    with progress_bars() as update:
        if model in bundled.known_models():
            bundled.pull(model, progress=update)
        elif not Path(model).expanduser().exists() and hub.parse(model) is not None:
            model = str(hub.pull(model, progress=update))
        start = time.perf_counter()
        if decodable or quantize is not None:
            form = False if Path(model).expanduser().is_dir() else "blocks"
        options: dict[str, Any] = {"packed": form}
        if update is not None:
            options["progress"] = lambda done, total: update("load", done, total)
        loaded = infer.load(model, dtype=dtype, **options)
    if quantize is not None:
        loaded = _quantized(loaded, quantize, implementation)
    return loaded, time.perf_counter() - start


def check_name(quantize: str) -> None:
    """Refuse a short name that is of no method, before anything is loaded."""
    from infer.quantization import by_name

    by_name.short(quantize)


def _quantized(loaded: Any, name: str, implementation: str | None) -> Any:
    """Return the model with the matrices of its layers quantised, in the order of the CPU's native
    operations where those run it; say so on standard error.
    """
    import dataclasses

    import infer
    from infer.backend import default_platform
    from infer.models import panels
    from infer.quantization import by_name
    from infer.quantization.report import report, widths

    method = by_name.short(name, widths(loaded.params))
    with counting_bar("layers", loaded.config.num_layers) as count:
        step = None if count is None else lambda done, total: count(done)
        params = infer.quantize(loaded.params, method, progress=step)
    made = report(loaded.params, params)
    print(
        f"infer: {', '.join(made.packed)}, {made.bits_per_weight:.3f} bits a weight in the layers;"
        f" {made.bytes_before / 1e6:,.1f} MB before, {made.bytes_after / 1e6:,.1f} MB after",
        file=sys.stderr,
    )
    if implementation in (None, "native") and default_platform() == "cpu" and native.by_default():
        params = panels.repack(params)
    return dataclasses.replace(loaded, params=params)


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
