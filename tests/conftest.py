"""Strict arithmetic and strict shapes."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest
from jaxtyping import install_import_hook

from tests import typecheck

install_import_hook("infer", f"{typecheck.__name__}.checked")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config: pytest.Config) -> None:
    """Keep compiled programs between runs where INFER_TEST_XLA_CACHE names a folder.

    Not by default: two of some thousand programs ended a worker with a segmentation fault inside
    jaxlib 0.10.2, once as it wrote an entry and once as it read one.
    """
    if cache := os.environ.get("INFER_TEST_XLA_CACHE"):
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run of tests/models/test_families.py write docs/models.md."""
    parser.addoption(
        "--write-support-matrix", action="store_true", help="measure anew and write docs/models.md"
    )
