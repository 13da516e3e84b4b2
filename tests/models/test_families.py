"""Every family against transformers in float32: logits, greedy ids, and its GGUF twin.

The golden files are made by scripts/goldens/families.py; weights come from tests/models/checkpoint.
"""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import infer
from infer.models import decoder
from infer.models.params import Params
from infer.models.registry import layouts
from infer.weights.folder import load_folder
from infer.weights.load import load_gguf
from tests.models import checkpoint, gguf_twin, support_matrix
from tests.weights import hf_folders

DATA = Path(__file__).parent.parent / "data" / "families"
CASES = sorted(path.stem for path in DATA.glob("*.npz"))
# llama.cpp has no key for this scaling, so no GGUF file can ask for it.
NO_GGUF = {"llama_dynamic"}
_FORWARD = jax.jit(decoder.forward)


@functools.cache
def golden(case: str) -> dict[str, Any]:
    data = dict(np.load(DATA / f"{case}.npz"))
    return data | json.loads(data["header"].tobytes())


def tensors(case: str) -> dict[str, np.ndarray]:
    g = golden(case)
    return {name: checkpoint.values(name, tuple(s), g["norm_base"]) for name, s in g["tensors"]}


@functools.cache
def from_hf(case: str) -> Params:
    with tempfile.TemporaryDirectory() as folder:
        return load_folder(hf_folders.write(Path(folder), golden(case)["config"], tensors(case)))


def worst_logit(case: str, params: Params) -> float:
    """Return the largest difference from transformers at the kept positions of the long text."""
    g = golden(case)
    logits = np.asarray(_FORWARD(params, jnp.asarray(g["tokens"])[None]))[0]
    return float(np.abs(logits[g["kept"]] - g["logits"]).max())


@pytest.mark.parametrize("case", CASES)
def test_logits_agree_with_transformers(case: str) -> None:
    params = from_hf(case)
    assert worst_logit(case, params) < 1e-4
    if params.config.ropes_by_length:
        # A sequence of its own, within the original context.
        g = golden(case)
        short = _FORWARD(params, jnp.asarray(g["tokens"])[None, :24])[0, -1]
        assert np.abs(np.asarray(short) - g["short_logits"]).max() < 1e-4


# Prompts in tiles of 5 tokens for all; one token at a time, and whole, for one of each mechanism
# that depends on positions: windows beside NoPE, two rotary tables, spans, learned positions.
_CHUNKS = [
    *((case, 5) for case in CASES),
    *((case, chunk) for case in ("cohere2", "gemma3", "phi3", "gpt2") for chunk in (1, 256)),
]


@pytest.mark.parametrize(("case", "chunk"), _CHUNKS)
def test_greedy_ids_are_those_of_transformers_in_any_chunks(case: str, chunk: int) -> None:
    g = golden(case)
    out = infer.generate(
        from_hf(case),
        [g["prompt"].tolist()],
        sampling=infer.SamplingParams(temperature=0, max_tokens=64, ignore_eos=True),
        prefill_chunk=chunk,
        page_size=8,
    )
    np.testing.assert_array_equal(out.tokens[0], g["greedy"])


@pytest.mark.parametrize("case", [case for case in CASES if case not in NO_GGUF])
def test_the_gguf_twin_is_the_same_model(case: str, tmp_path: Path) -> None:
    path = gguf_twin.write(tmp_path / "m.gguf", golden(case)["config"], tensors(case))
    params, twin = from_hf(case), load_gguf(path)
    for have, want in zip(jax.tree.leaves(twin), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(have, want)
    assert worst_logit(case, twin) < 1e-4


def _page(measured: bool) -> str:
    """The support matrix; without measuring, every figure is 0."""
    rows: list[support_matrix.Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for case, label in support_matrix.LABELS.items():
            c = golden(case)["config"]
            arch = gguf_twin.ARCH.get(c["model_type"], c["model_type"])
            error, twin = 0.0, None if case in NO_GGUF else 0.0
            if measured:
                error = worst_logit(case, from_hf(case))
                if case not in NO_GGUF:
                    path = gguf_twin.write(Path(folder) / "m.gguf", c, tensors(case))
                    twin = worst_logit(case, load_gguf(path))
            rows.append((label, c["architectures"][0], error, arch, twin))
    return support_matrix.render(rows, golden("llama")["versions"]["transformers"])


def test_the_support_matrix_is_fresh(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--write-support-matrix"):
        support_matrix.PATH.write_text(_page(measured=True), encoding="utf-8")
    page = support_matrix.PATH.read_text(encoding="utf-8")
    strip = support_matrix.without_figures
    assert strip(page) == strip(_page(measured=False)), "write it anew: --write-support-matrix"
    assert sorted(support_matrix.LABELS) == CASES
    assert max(support_matrix.figures(page)) < 1e-4
    covered = {golden(case)["config"]["architectures"][0] for case in CASES}
    missing = {layout.architectures[0] for layout in layouts()} - covered
    assert not missing, f"no golden case for {sorted(missing)}"
