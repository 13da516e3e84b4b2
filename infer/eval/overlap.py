"""Calibration text that is in the evaluation text too: refused, since its figures would flatter.

A quantised checkpoint carries the fingerprint of its calibration text in its metadata (the key is
`infer.fingerprint.METADATA_KEY`).
"""

from collections.abc import Sequence
from pathlib import Path

from infer import fingerprint
from infer.errors import RequestError
from infer.eval.windows import Windows
from infer.fingerprint import Fingerprint
from infer.weights.safetensors import SafetensorsFile

# Licence headers and set phrases are common to many texts.
ALLOWED = 0.01


def calibration_of(path: Path) -> Fingerprint | None:
    """Return the fingerprint that a model's file or folder records; None where there is none.

    Raises:
        ValueError: the record is broken.
    """
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    for file in files:
        if file.suffix != ".safetensors":
            continue
        with SafetensorsFile.open(file) as opened:
            if (record := opened.metadata.get(fingerprint.METADATA_KEY)) is not None:
                return Fingerprint.from_json(record)
    return None


def share(text: Windows, calibration: Fingerprint) -> float:
    """Return the share of an evaluation text that occurs in a calibration text.

    A fingerprint of tokens is compared with the windows' ids, which must be of the same tokenizer;
    one of text with the text, and with nothing where only ids are known (0).
    """
    if calibration.kind == "tokens":
        # The first one may be a BOS that the calibration had elsewhere.
        return fingerprint.share_in(fingerprint.token_hashes(text.ids[:, 1:]), calibration)
    if text.text is None:
        return 0.0
    return fingerprint.share_in(fingerprint.text_hashes(text.text), calibration)


def refuse_overlap(model: str, texts: Sequence[Windows], calibration: Fingerprint | None) -> None:
    """Raise RequestError if more than 1% of an evaluation text was used to calibrate the model."""
    if calibration is None:
        return
    for text in texts:
        common = share(text, calibration)
        if common > ALLOWED:
            raise RequestError(
                f"{common:.0%} of {text.name} is in the text that {model} was calibrated with, so "
                "it would look better than it is; evaluate on another text, or allow it "
                "(allow_overlap=True, --allow-overlap)"
            )
