"""Fingerprints of a text or of token ids, small enough for a checkpoint's metadata.

A text is normalised (NFKC, case folded, one space for any white space) and every 64 bytes of it in
a row, a shingle, become a hash of 64 bits; of ids every 16 in a row.  The smallest 4,096 of the
different hashes are kept.  Which hashes are small has nothing to do with what the text says: among
the hashes up to the largest one kept, the share that another text has in common with these
estimates the share of its shingles that occur in this text.
Source: Broder 1997, On the resemblance and containment of documents.
"""

import base64
import json
import unicodedata
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, UInt64

TEXT_SHINGLE = 64  # bytes
TOKEN_SHINGLE = 16  # ids
KEPT = 4096
# The key of a checkpoint's metadata that holds `Fingerprint.to_json` of its calibration text.
METADATA_KEY = "calibration_fingerprint"

_BASE = 0x9E3779B97F4A7C15  # odd: it has an inverse modulo 2**64
_INVERSE = pow(_BASE, -1, 2**64)


@dataclass(frozen=True)
class Fingerprint:
    """The smallest hashes of a sequence's shingles, and the bound below which all are there."""

    kind: str  # "text" or "tokens"
    hashes: UInt64[np.ndarray, " N"]  # sorted
    bound: int  # every hash of the sequence up to this one is in `hashes`

    def to_json(self) -> str:
        """Return it as one line for a checkpoint's metadata, 44 kB at most."""
        data = base64.b64encode(self.hashes.astype("<u8").tobytes()).decode()
        return json.dumps({"kind": self.kind, "bound": self.bound, "hashes": data})

    @classmethod
    def from_json(cls, text: str) -> "Fingerprint":
        """Read what `to_json` wrote.

        Raises:
            ValueError: it is something else.
        """
        try:
            found = json.loads(text)
            kind, bound = found["kind"], found["bound"]
            raw = base64.b64decode(found["hashes"], validate=True)
            hashes = np.frombuffer(raw, "<u8").astype(np.uint64)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                f"{METADATA_KEY} is not a fingerprint ({type(error).__name__}); quantise the model "
                "again, or remove the entry"
            ) from None
        valid = kind in ("text", "tokens") and type(bound) is int and 0 <= bound < 2**64
        if not valid or len(hashes) > KEPT or np.any(hashes[1:] <= hashes[:-1]):
            raise ValueError(
                f"{METADATA_KEY} is of the kind {kind!r:.20} with {len(hashes)} hashes; it has at "
                f"most {KEPT} sorted ones of 'text' or 'tokens'"
            )
        return cls(kind, hashes, bound)


def of_text(text: str) -> Fingerprint:
    """Return the fingerprint of a text."""
    return _smallest("text", text_hashes(text))


def of_tokens(ids: Int[np.ndarray, "..."]) -> Fingerprint:
    """Return the fingerprint of token ids; rows of an array are sequences of their own."""
    rows = np.atleast_2d(np.asarray(ids))
    return _smallest("tokens", token_hashes(rows.reshape(-1, rows.shape[-1])))


def text_hashes(text: str) -> UInt64[np.ndarray, " N"]:
    """Return the hash of every shingle of a normalised text, in order."""
    normal = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return _hashes(np.frombuffer(normal.encode("utf-8", "replace"), np.uint8), TEXT_SHINGLE)


def token_hashes(rows: Int[np.ndarray, "R T"]) -> UInt64[np.ndarray, " N"]:
    """Return the hash of every shingle of every row of ids."""
    parts = [_hashes(np.asarray(row), TOKEN_SHINGLE) for row in rows]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint64)


def share_in(hashes: UInt64[np.ndarray, " N"], known: Fingerprint) -> float:
    """Return the estimated share of shingles, 0 to 1, that occur in the text of `known`."""
    comparable = hashes[hashes <= np.uint64(known.bound)]
    return float(np.isin(comparable, known.hashes).mean()) if len(comparable) else 0.0


def _smallest(kind: str, hashes: np.ndarray) -> Fingerprint:
    found = np.unique(hashes)
    if len(found) <= KEPT:
        return Fingerprint(kind, found, 2**64 - 1)
    return Fingerprint(kind, found[:KEPT], int(found[KEPT - 1]))


def _hashes(items: np.ndarray, width: int) -> np.ndarray:
    """Return a hash of every `width` items in a row: a polynomial modulo 2**64 by prefix sums, then
    mixed (the finaliser of SplitMix64, Steele et al. 2014), since a sum's low bits are not random.
    """
    count = len(items) - width + 1
    if count < 1:
        return np.zeros(0, np.uint64)
    values = items.astype(np.uint64) + np.uint64(1)
    powers = np.cumprod(np.full(len(items), _BASE, np.uint64))
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(values * powers)])
    back = np.cumprod(np.full(count, _INVERSE, np.uint64))
    h = (sums[width:] - sums[:-width]) * back
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))
