"""Strict arithmetic, strict shapes and one compilation cache for the whole run."""

import os
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest
from jaxtyping import install_import_hook

from tests import typecheck

install_import_hook("infer", f"{typecheck.__name__}.checked")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config: pytest.Config) -> None:
    """Share compiled programs between the workers of one run, and between runs in the same
    checkout.
    """
    cache = os.environ.get("INFER_TEST_XLA_CACHE") or os.path.join(
        tempfile.gettempdir(), f"infer-test-xla-{os.getuid()}-{jax.__version__}"
    )
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run of tests/models/test_families.py write docs/models.md."""
    parser.addoption(
        "--write-support-matrix", action="store_true", help="measure anew and write docs/models.md"
    )
