"""Quality, measured: perplexity, divergence from a base, comparison with intervals, tasks."""

from infer.eval.measures import compare, control, divergence, perplexity
from infer.eval.results import Comparison, Control, Divergence, Perplexity
from infer.eval.texts import BUILT_IN, read_text

__all__ = [
    "BUILT_IN",
    "Comparison",
    "Control",
    "Divergence",
    "Perplexity",
    "compare",
    "control",
    "divergence",
    "perplexity",
    "read_text",
]
