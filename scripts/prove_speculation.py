"""Speculation on the real models gives what plain decoding gives.

    python scripts/prove_speculation.py --model smollm2-135m --check greedy
    python scripts/prove_speculation.py --model gemma3-270m --check coupled
    python scripts/prove_speculation.py --model smollm2-135m --check sampling --cell 0

`greedy` and `coupled` compare tokens and log-probabilities of 50 prompts with and without drafts,
all drafters without a model, bit for bit.  `sampling` draws `--runs` continuations of four tokens
of a text that repeats, by block verification or the token rule, and compares their joint
distribution with the products of the model's own probabilities, by chi-square and total variation
at a rate of false alarms of 1e-4 a cell.
"""

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import infer
from infer.spec import Lookahead, NGram, Suffix
from tests.spec.agreement import compare

SUBJECTS = ("rivers", "bread", "the moon", "a violin", "winter", "bees", "a harbour", "numbers",
            "an old map", "tea")  # fmt: skip
FORMS = (
    "Write about {0}. Write about {0} again:",
    "def {1}(x):\n    return x + 1\n\ndef {1}_twice(x):\n    return",
    "Q: What is {0}?\nA:",
    "{0}, {0}, {0}, and then",
    '{{"name": "{0}", "size": 1}}, {{"name": "{0}", "size": 2}}, {{"name":',
)
PROMPTS = [form.format(s, s.replace(" ", "_")) for form in FORMS for s in SUBJECTS]
# In every turn, whether it pays or not.
DRAFTERS = {
    "ngram": NGram(k=4, min_match=1, adaptive=False),
    "suffix": Suffix(k=6, tiers=(0, 2, 6), adaptive=False),
    "lookahead": Lookahead(k=4, adaptive=False),
}
REPEATING = "one two three one two three one two"
LENGTH, FALSE_ALARMS = 4, 1e-4
CELLS: list[tuple[dict[str, float], Any]] = [
    (dict(temperature=1.0, top_k=4), NGram(k=3, min_match=1, adaptive=False)),
    (
        dict(temperature=1.5, top_k=4, repetition_penalty=1.05),
        NGram(k=3, min_match=1, rule="token", adaptive=False),
    ),
    (
        dict(temperature=1.2, top_k=4, top_p=0.9, min_p=0.02),
        Suffix(k=3, tiers=(0, 1, 3), costs=(1.0, 1.2, 1.5)),
    ),
]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a check; return 0 if it holds."""
    p = argparse.ArgumentParser(description="Speculation gives what plain decoding gives.")
    p.add_argument("--model", default="smollm2-135m")
    p.add_argument("--check", choices=["greedy", "coupled", "sampling"], required=True)
    p.add_argument("--tokens", type=int, default=64, help="new tokens of each of the 50 prompts")
    p.add_argument("--cell", type=int, choices=range(len(CELLS)), default=0)
    p.add_argument("--runs", type=int, default=4096)
    options = p.parse_args(arguments)
    model = infer.load(options.model, packed=None)
    if options.check == "sampling":
        found = sampled(model, options.cell, options.runs)
    else:
        found = equal(model, options.check, options.tokens)
    found = {"model": options.model, "check": options.check} | found
    print(json.dumps(found))
    return 0 if found["holds"] else 1


def equal(model: infer.Model, check: str, tokens: int) -> dict[str, Any]:
    """Return whether tokens and log-probabilities are those of plain decoding."""
    warm = dict(temperature=0.7, top_p=0.95, repetition_penalty=1.05)
    fields = dict(temperature=0.0) if check == "greedy" else warm
    each = [infer.SamplingParams(**fields, max_tokens=tokens, seed=i) for i in range(len(PROMPTS))]
    plain = model.generate(PROMPTS, each, num_slots=8)
    found: dict[str, Any] = {"prompts": len(PROMPTS), "tokens": int(plain.lengths.sum())}
    holds = True
    for name, draft in DRAFTERS.items():
        if check == "coupled":
            draft = dataclasses.replace(draft, rule="coupled")
        out = model.generate(PROMPTS, each, num_slots=8, draft=draft)
        rows = [out.token_ids(i) == plain.token_ids(i) for i in range(len(PROMPTS))]
        bits = bool(np.array_equal(out.logprobs, plain.logprobs))
        holds = holds and all(rows) and bits
        kept = ("acceptance_rate", "tokens_per_pass", "turns", "passes_by_k")
        found[name] = {"equal_prompts": sum(rows), "logprobs_bit_equal": bits}
        found[name] |= {key: out.stats[key] for key in kept}
    return found | {"plain_turns": plain.stats["turns"], "holds": holds}


def sampled(model: infer.Model, cell: int, runs: int) -> dict[str, Any]:
    """Return whether drawn continuations have the model's distribution."""
    fields, draft = CELLS[cell]
    expected, ids = distribution(model, fields)
    sampling = infer.SamplingParams(**fields, max_tokens=LENGTH, n=runs, seed=0, ignore_eos=True)
    out = model.generate([REPEATING], sampling, num_slots=32, draft=draft)
    counts = np.zeros(len(expected), np.int64)
    for row in out.tokens:
        counts[ids[tuple(row.tolist())]] += 1
    agreement = compare(counts, expected, false_alarms=FALSE_ALARMS)
    kept = ("draft", "acceptance_rate", "accepted", "drafted")
    found = dataclasses.asdict(agreement) | {key: out.stats[key] for key in kept}
    holds = agreement.holds(FALSE_ALARMS) and out.stats["accepted"] > 0
    return {"cell": cell, "sampling": fields, "runs": runs, "holds": holds} | found


def distribution(
    model: infer.Model, fields: dict[str, float]
) -> tuple[np.ndarray, dict[tuple[int, ...], int]]:
    """Return the probability of each continuation that can be drawn, and its index.

    The probabilities of a next token are those that `generate` reports as sampled from; the last
    cell is everything else, which has none.
    """
    start = model.tokenizer.encode(REPEATING)
    known: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        prefixes = list(known)
        sampling = infer.SamplingParams(**fields, max_tokens=1, logprobs=5, seed=0)
        out = model.generate(
            [[*start, *prefix] for prefix in prefixes],
            sampling,
            num_slots=16,
            logprobs_mode="processed",
        )
        known = {
            (*prefix, int(token)): known[prefix] * float(np.exp(logprob))
            for row, prefix in enumerate(prefixes)
            for token, logprob in zip(out.top_tokens[row, 0], out.top_logprobs[row, 0], strict=True)
            if np.isfinite(logprob)
        }
    probabilities = np.asarray(list(known.values()), np.float64)
    return probabilities / probabilities.sum(), dict(zip(known, itertools.count(), strict=False))


if __name__ == "__main__":
    sys.exit(main())
