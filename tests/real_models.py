"""Where the real models of the tests lie; a test that needs one that is absent is skipped."""

import os
from pathlib import Path

import pytest

# Name -> (file in the cache's `models` folder, the variable that names another place).
_FILES = {
    "smollm2-135m": ("SmolLM2-135M-Instruct.Q4_1.gguf", "INFER_TEST_SMOLLM2"),
    "gemma-3-270m": ("gemma-3-270m-q4_k_m.gguf", "INFER_TEST_GEMMA3"),
}


def real_model_path(name: str) -> Path:
    """Return the path of a real model's file, or skip the test that asks for it."""
    file, variable = _FILES[name]
    cache = Path(os.environ.get("INFER_CACHE") or Path.home() / ".cache" / "infer")
    path = Path(os.environ.get(variable) or cache / "models" / file)
    if not path.is_file():
        pytest.skip(f"{path} is absent; fetch it with `infer pull`, or name it in {variable}")
    return path
