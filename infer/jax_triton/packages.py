"""Whether the packages are installed that kernels of `infer.jax_triton` need.  Imports none."""

from importlib import metadata

# jax-triton calls the inside of Triton's compiler, so the two fit in pairs; this is the tested one.
_RELEASES = {"jax-triton": "0.3", "triton": "3.6"}
INSTALL = "pip install 'jax-triton>=0.3,<0.4' 'triton>=3.6,<3.7'"


def missing() -> str | None:
    """Return what is missing and how to install it, in words; None if nothing is."""
    for package, release in _RELEASES.items():
        try:
            found = metadata.version(package)
        except metadata.PackageNotFoundError:
            return f"{package} is not installed ({INSTALL})"
        if found.split(".")[:2] != release.split("."):
            return f"{package} is {found}, and needed is {release} ({INSTALL})"
    return None
