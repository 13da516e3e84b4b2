"""Loading for the commands that run a model: compilation cache, download, progress, time taken."""

import os
import sys
import time
from pathlib import Path
from typing import Any

from infer.cli.implementation import say_what_is_missing
from infer.cli.progress import progress_bars
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
    packed: bool | str | None = None,
    implementation: str | None = None,
    quantize: str | None = None,
) -> tuple[Any, float]:
    """Return the loaded model and the seconds it took, a download not counted.

    Where native operations are missing that could be had, one line on standard error says so.

    Args:
        model: what the user named.
        dtype: of `infer.load`.
        packed: of `infer.load`; None is False where another implementation than "native" is forced,
            which cannot read the native operations' weights; "blocks" is False for a folder, which
            has none.
        implementation: what will run it, or None.
        quantize: a method's short name (`infer.quantization.by_name.short`) for the matrices of all
            layers, or None.
    """
    import infer

    if quantize is not None:
        packed = "blocks"  # what the native operations read is not decoded
    if implementation in (None, "native"):
        say_what_is_missing()
    elif packed is None:
        packed = False
    with progress_bars() as update:
        if model in bundled.known_models():
            bundled.pull(model, progress=update)
        elif not Path(model).expanduser().exists() and hub.parse(model) is not None:
            model = str(hub.pull(model, progress=update))
        start = time.perf_counter()
        if packed == "blocks" and Path(model).expanduser().is_dir():
            packed = False
        options: dict[str, Any] = {"packed": packed}
        if update is not None:
            options["progress"] = lambda done, total: update("load", done, total)
        loaded = infer.load(model, dtype=dtype, **options)
    if quantize is not None:
        loaded = _quantized(loaded, quantize)
    return loaded, time.perf_counter() - start


def check_name(quantize: str) -> None:
    """Refuse a short name that is of no method, before anything is loaded."""
    from infer.quantization import by_name

    by_name.short(quantize)


def _quantized(loaded: Any, name: str) -> Any:
    """Return the model with the matrices of its layers quantised; say so on standard error."""
    import dataclasses

    import infer
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
    return dataclasses.replace(loaded, params=params)
