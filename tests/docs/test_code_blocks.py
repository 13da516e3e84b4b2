"""The Python in the documentation runs, on a tiny model in place of the real one."""

import re
from pathlib import Path
from typing import Any

import jax
import pytest

import infer
from tests.models import tiny_folder

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> infer.Model:
    return infer.load(tiny_folder.write(tmp_path_factory.mktemp("m") / "tiny"))


@pytest.mark.parametrize(
    ("page", "num_blocks"),
    [
        ("README.md", 1),
        ("docs/generate-inside-jit.md", 9),
        ("docs/quantisation.md", 2),
        ("docs/evaluation.md", 1),
        ("docs/speculation.md", 4),
    ],
)
def test_blocks_run_in_order(
    tiny: infer.Model,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    page: str,
    num_blocks: int,
) -> None:
    monkeypatch.chdir(tmp_path)  # where the pages write their files
    monkeypatch.setattr(infer, "load", lambda name: tiny)
    text = (ROOT / page).read_text()
    blocks = list(_BLOCK.finditer(text))
    assert len(blocks) == num_blocks
    names: dict[str, Any] = {"__name__": page}
    # Users do not run under the strictness of our tests.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in blocks:
            line = text[: block.start()].count("\n") + 1
            # Lines of a traceback are those of the page.
            exec(compile("\n" * line + block[1], str(ROOT / page), "exec"), names)
