"""The bundled real models, for tests under the marker `real`: where they are, or why not."""

import os
from pathlib import Path

import pytest

FILES = {
    "smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "gemma3": "gemma-3-270m-q4_k_m.gguf",
}


def real_model_path(name: str) -> Path:
    """The file of a model; the test is skipped where it is not there."""
    cache = os.environ.get("INFER_CACHE")
    folder = Path(cache) if cache else Path.home() / ".cache" / "infer" / "models"
    path = folder / FILES[name]
    if not path.exists():
        pytest.skip(f"{path} is not there; `infer pull` fetches it")
    return path
