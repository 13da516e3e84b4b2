"""The type checker that the import hook of conftest.py puts on every function of `infer`."""

import contextlib
from collections.abc import Iterator

import jaxtyping
from beartype import BeartypeConf, beartype

# An int is a float to every static checker (PEP 484), and users pass `temperature=0`.
checked = beartype(conf=BeartypeConf(is_pep484_tower=True))


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Let wrong shapes and dtypes through to our own checks, as they come outside tests."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)
