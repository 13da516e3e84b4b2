"""Speculative decoding: what verifies drafts, and what drafts.

Pure functions over pytrees, and the drafters that `generate(..., draft=)` takes.
"""

from infer.spec.drafters import Drafter, NGram, Suffix
from infer.spec.jacobi import Lookahead
from infer.spec.models import DraftModel, SelfDraft
from infer.spec.verify import Rule

__all__ = ["DraftModel", "Drafter", "Lookahead", "NGram", "Rule", "SelfDraft", "Suffix"]
