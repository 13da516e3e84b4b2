"""Strict arithmetic, strict shapes and one compilation cache for the whole run.

The suite runs what users get: native operations where they can be built, which happens once before
the first test.  `INFER_NATIVE=0 pytest` runs plain XLA (and tests/native, which asks by name).
`INFER_TEST_COMPILE=fast pytest -m "not optimized"` has XLA compile in less than half the time, for
slower programs; what is marked `optimized` is about the code that XLA makes for users, or runs too
long without it.
"""

import gc
import os
import sys
import tempfile
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if sys.version_info >= (3, 12):
    # XLA:CPU's threads.  The interpreter of Mosaic kernels, which only this leg has, blocks one for
    # each of three warpgroups, and stops for ever where there are fewer.
    os.environ.setdefault("NPROC", str(max(4, os.cpu_count() or 1)))

import jax
import pytest
from jaxtyping import install_import_hook

from tests import native_library, typecheck

install_import_hook("infer", f"{typecheck.__name__}.checked")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


# LLVM at -O0 leaves loops as they are; the older of XLA:CPU's two emitters, which JAX 0.11 has no
# longer, makes no MLIR context for each fusion.
_FAST_COMPILE = "--xla_backend_optimization_level=0"
if jax.__version_info__ < (0, 11):  # XLA ends a process that has a flag it does not know
    _FAST_COMPILE = f"--xla_cpu_use_fusion_emitters=false {_FAST_COMPILE}"


def _compile_fast() -> None:
    """Set XLA's flags, for subprocesses too; XLA reads them before its first program."""
    flags = os.environ.get("XLA_FLAGS", "")
    if _FAST_COMPILE not in flags:  # a worker has them from who started it
        os.environ["XLA_FLAGS"] = f"{flags} {_FAST_COMPILE}".strip()


def _share_programs() -> None:
    """Keep compiled programs in one folder for the workers and subprocesses of a run, and for later
    runs of this version of JAX.
    """
    cache = os.environ.get("INFER_TEST_XLA_CACHE") or os.path.join(
        tempfile.gettempdir(), f"infer-test-xla-{os.getuid()}-{jax.__version__}"
    )
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"


def pytest_configure(config: pytest.Config) -> None:
    """Set how XLA compiles; build the native library before there are workers."""
    if os.environ.get("INFER_TEST_COMPILE") == "fast":
        _compile_fast()
    _share_programs()
    if os.environ.get("INFER_NATIVE") != "0" and not hasattr(config, "workerinput"):
        native_library.build_if_stale()


def pytest_report_header() -> str:
    """Say which implementation the suite runs."""
    return f"native operations: {native_library.description()}"


@pytest.fixture(autouse=True)
def _room_for_programs() -> Iterator[None]:
    """Drop compiled programs before the process reaches Linux's limit of memory maps.

    A program of `generate` takes about 950 maps on XLA:CPU; past 65,530 in all (vm.max_map_count)
    XLA ends the process with a segmentation fault.
    """
    yield
    try:
        with open("/proc/self/maps", "rb") as maps:
            count = sum(1 for _ in maps)
    except OSError:
        return
    if count > 35_000:
        jax.clear_caches()
        gc.collect()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run of tests/models/test_families.py write docs/models.md."""
    parser.addoption(
        "--write-support-matrix", action="store_true", help="measure anew and write docs/models.md"
    )
