"""docs/models.md: what runs, from which kind of file, and how far from transformers.

Written by `pytest tests/models/test_families.py --write-support-matrix`, never by hand.
"""

from pathlib import Path

PATH = Path(__file__).parents[2] / "docs" / "models.md"

# Case of tests/data/families -> what it stands for.
LABELS = {
    "llama": "Llama 3.x, SmolLM2 (llama3 scaling, grouped heads)",
    "llama_linear": "Llama 1 and 2 (linear scaling, biases, tied head)",
    "llama_dynamic": "Llama with dynamic NTK scaling",
    "llama_yarn": "Llama with YaRN scaling",
    "mistral": "Mistral (all layers slide)",
    "ministral": "Ministral (sliding and full layers)",
    "qwen2": "Qwen 2, Qwen 2.5 (biases, windows from a layer on)",
    "qwen3": "Qwen 3 (norms on each head of q and k)",
    "gemma": "Gemma 1",
    "gemma2": "Gemma 2 (softcaps, alternating windows)",
    "gemma3": "Gemma 3 text (two rotary tables)",
    "phi3": "Phi-3, Phi-4 (fused tensors, LongRoPE, window)",
    "phi4_mini": "Phi-4-mini (part of each head turns)",
    "smollm3": "SmolLM3 (NoPE layers)",
    "olmo2": "OLMo 2 (norms after, norms over all of q and k)",
    "granite": "Granite (four multipliers)",
    "starcoder2": "StarCoder2 (LayerNorm, no gate, window)",
    "glm4": "GLM-4-0414 (adjacent pairs, part of each head turns)",
    "cohere2": "Command R7B (parallel blocks, NoPE layers)",
    "gpt2": "GPT-2 (learned positions)",
    "gpt_neox": "Pythia, GPT-NeoX (parallel blocks)",
    "gpt_neox_sequential": "GPT-NeoX, sequential",
}

_HEAD = """\
# Models

Written by `pytest tests/models/test_families.py --write-support-matrix`; edits are lost.

Each row is a tiny random model with odd sizes that transformers {transformers} made. The figures
are the largest difference of a logit from transformers in float32, over 15 positions up to 159 of
a text that is longer than every window and original context; logits reach about 5. The same tests
hold 64 greedy tokens, through the paged cache and in prefill tiles of 5, equal to transformers',
and the weights of the GGUF file equal to those of the safetensors folder.

| model | `architectures` | safetensors | GGUF architecture | GGUF |
|---|---|---|---|---|
"""
_TAIL = """
A dash: llama.cpp has no key that asks for it. Mistral's and Ministral's GGUF files have the
architecture `llama`; a window counts there where the file has `llama.attention.sliding_window`.
Another architecture is refused with the list of these.

`infer convert` takes each row both ways, folder to GGUF and GGUF to folder, but for the dashes.
What it writes reads back here as it is meant; llama.cpp itself ignores the windows of Mistral,
Ministral, Qwen 2, Phi-3 and StarCoder2.

Dynamic NTK and LongRoPE choose rotary frequencies by the length of a sequence. Here that is its
planned length, prompt plus `max_tokens`, from the first token on, so that cached keys and later
queries turn alike; `forward` and `score` take the length they are given. transformers takes the
length so far and keeps keys turned the old way, so the two differ where a generation crosses the
original context. A larger `max_tokens` can thus change the tokens of such a model.

How to add one: [adding-a-model.md](adding-a-model.md).
"""

Row = tuple[str, str, float, str, float | None]  # a row of the table; None: no such GGUF file


def render(rows: list[Row], transformers: str) -> str:
    """Return the page."""
    lines = [
        f"| {label} | {architecture} | {error:.0e} | "
        + ("– | – |" if twin is None else f"{gguf} | {twin:.0e} |")
        for label, architecture, error, gguf, twin in rows
    ]
    return _HEAD.format(transformers=transformers) + "\n".join(lines) + "\n" + _TAIL


def without_figures(page: str) -> list[str]:
    """Return the page's lines, those of the table without their figures."""
    cells = lambda line: [cell for i, cell in enumerate(line.split("|")) if i not in (3, 5)]
    return ["|".join(cells(x)) if x.startswith("| ") else x for x in page.splitlines()]


def figures(page: str) -> list[float]:
    """Return the figures of the table."""
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| ")][1:]
    return [float(row[i]) for row in rows for i in (3, 5) if row[i].strip() != "–"]
