"""Quantised weights in a folder of our own form: what its files say of them.  No JAX in here.

config.json     "quantization_config": {"quant_method": "infer", "version": 1,
                    "formats": {key: format}, "weights": {name: key}, "calibration": {...}}
*.safetensors   a weight that stays in floats under the checkpoint's own name; of a packed one
                the parts NAME.data, NAME.scale, NAME.zero, ... (`PARTS`), packed bytes as uint8
__metadata__    "infer_quantization": formats and weights once more, so that files of two
                models are told apart; "calibration_fingerprint" (`infer.fingerprint`)
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from infer import fingerprint
from infer.errors import ConfigError, WeightFormatError
from infer.fingerprint import Fingerprint
from infer.model_files import shown
from infer.quant.format_json import from_json, to_json
from infer.quant.formats import Format

METHOD = "infer"
VERSION = 1
METADATA_KEY = "infer_quantization"

_COUNTS = ("num_tokens", "num_sequences")

# Of a packed weight, after its name and a dot; which of them there are is a matter of its format.
PARTS = (
    "data",
    "scale",
    "scale.codes",
    "scale.absmax",
    "scale.offset",
    "zero",
    "global_scale",
    "perm",
    "act_scale",
)


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What a model was calibrated with, as its files record it.

    Attributes:
        kind: "text" or "tokens": what was given.
        sha256: of the text's UTF-8, or of the ids as 32-bit integers, little end first.
        num_tokens: that were looked at.
        num_sequences: that they make.
        text: what the text is called, "" where nobody said.
        method: in words, "" where nobody said.
        fingerprint: of what was looked at; None if the files have lost it.
    """

    kind: str
    sha256: str
    num_tokens: int
    num_sequences: int
    text: str = ""
    method: str = ""
    fingerprint: Fingerprint | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        tokens: Any,
        *,
        text: str | None = None,
        used: str | None = None,
        name: str = "",
        method: str = "",
    ) -> "Calibration":
        """Return the record of a calibration.

        Args:
            tokens: ids [N, S], as they were given to `infer.quantize`.
            text: the text that they come from, if there is one.
            used: the part of it that they are; None: all of it.
            name: what the text is called.
            method: that looked at it, in words.

        Raises:
            ConfigError: these are no ids.
        """
        ids = np.asarray(tokens)
        if ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer) or not ids.size:
            raise ConfigError(
                f"calibration is {ids.dtype}{list(ids.shape)}; pass the token ids [N, S] that"
                " infer.quantize was given, or leave it out"
            )
        if text is None:
            mark, source = fingerprint.of_tokens(ids), ids.astype("<i4").tobytes()
        else:
            mark = fingerprint.of_text(text if used is None else used)
            source = text.encode("utf-8", "replace")
        return cls(
            kind=mark.kind,
            sha256=hashlib.sha256(source).hexdigest(),
            num_tokens=int(ids.size),
            num_sequences=len(ids),
            text=name,
            method=method,
            fingerprint=mark,
        )

    @classmethod
    def from_json(cls, values: Any) -> "Calibration":
        """Return what config.json says of it; the fingerprint is in the other files.

        Raises:
            ValueError: it is something else.
        """
        found = values if isinstance(values, dict) else {}
        digest = found.get("sha256")
        counts = [found.get(key) for key in _COUNTS]
        words = {key: found.get(key, "") for key in ("text", "method")}
        if (
            found.get("of") not in ("text", "tokens")
            or not isinstance(digest, str)
            or not re.fullmatch("[0-9a-f]{64}", digest)
            or not all(type(count) is int and count > 0 for count in counts)
            or not all(isinstance(word, str) for word in words.values())
        ):
            raise ValueError(
                f"calibration is {values!r:.120}; it must have of ('text' or 'tokens'), sha256,"
                f" {' and '.join(_COUNTS)}, and may have text and method"
            )
        counts = {key: found[key] for key in _COUNTS}
        return cls(kind=found["of"], sha256=digest, **counts, **words)

    def to_json(self) -> dict[str, Any]:
        """Return what config.json says of it."""
        found = {
            "of": self.kind,
            "sha256": self.sha256,
            "num_tokens": self.num_tokens,
            "num_sequences": self.num_sequences,
        }
        return found | {k: v for k in ("text", "method") if (v := getattr(self, k))}

    def metadata(self) -> dict[str, str]:
        """Return what stands in `__metadata__` of each file."""
        mark = self.fingerprint
        return {} if mark is None else {fingerprint.METADATA_KEY: mark.to_json()}


@dataclass(frozen=True)
class PackedForm:
    """Which weights of a folder are packed, and how.

    Attributes:
        weights: the format of each packed weight by its name.
        calibration: the record of the calibration; None if there is none.
    """

    weights: Mapping[str, Format]
    calibration: Calibration | None = field(default=None, compare=False)

    def to_json(self) -> dict[str, Any]:
        """Return formats and weights as objects."""
        keys: dict[Format, str] = {}
        for format in self.weights.values():
            if format not in keys:
                same = sum(f.name == format.name for f in keys)
                keys[format] = format.name + (f"#{same + 1}" if same else "")
        return {
            "formats": {key: to_json(format) for format, key in keys.items()},
            "weights": {name: keys[format] for name, format in self.weights.items()},
        }

    def config(self) -> dict[str, Any]:
        """Return config.json's `quantization_config`."""
        found = {"quant_method": METHOD, "version": VERSION, **self.to_json()}
        if self.calibration is not None:
            found["calibration"] = self.calibration.to_json()
        return found

    def metadata(self) -> dict[str, str]:
        """Return what stands in `__metadata__` of each file."""
        return {METADATA_KEY: json.dumps(self.to_json(), ensure_ascii=False)}

    def check_metadata(self, metadata: Mapping[str, str], path: str) -> None:
        """Hold a safetensors file's metadata against config.json.

        Raises:
            WeightFormatError: they are not of one model, or the file is not of this form.
        """
        text = metadata.get(METADATA_KEY)
        if text is None:
            raise WeightFormatError(
                f"{path}: has no {METADATA_KEY} in its metadata, and config.json says that weights"
                " are packed; get the whole folder again"
            )
        try:
            values = json.loads(text)
            same = _read(values).weights == self.weights
        except (ValueError, RecursionError) as error:
            raise WeightFormatError(
                f"{path}: {METADATA_KEY} in its metadata is broken ({error!s:.200})"
            ) from None
        if not same:
            raise WeightFormatError(
                f"{path}: its metadata and config.json name different packed weights or formats;"
                " they are not of one model, get the whole folder again"
            )


def is_own(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json says that its weights are packed in this form."""
    found = config.get("quantization_config")
    return isinstance(found, dict) and found.get("quant_method") == METHOD


def of_config(config: Mapping[str, Any], path: str) -> PackedForm | None:
    """Return what a config.json says of weights packed in this form; None where it says nothing.

    Raises:
        WeightFormatError: it is broken, or of a version that is not read.
    """
    if not is_own(config):
        return None
    found = config["quantization_config"]
    if type(found.get("version")) is not int or found["version"] != VERSION:
        raise WeightFormatError(
            f"{path}: quantization_config has the version {found.get('version')!r:.40}, and this"
            f" version of infer reads {VERSION}; save the model again, or take another infer"
        )
    try:
        return _read(found)
    except ValueError as error:
        raise WeightFormatError(f"{path}: quantization_config: {error}") from None


def _read(found: Any) -> PackedForm:
    formats, weights = (
        found.get(key) if isinstance(found, dict) else None for key in ("formats", "weights")
    )
    if not isinstance(formats, dict) or not isinstance(weights, dict):
        raise ValueError("formats and weights must be objects")
    known: dict[str, Format] = {}
    for key, values in formats.items():
        try:
            known[key] = from_json(values)
        except ValueError as error:
            raise ValueError(f"format {shown(key)}: {error}") from None
    for name, key in weights.items():
        if not isinstance(key, str) or key not in known:
            raise ValueError(f"{shown(name)} has the format {key!r:.60}, which is not described")
    calibration = found.get("calibration")
    record = None if calibration is None else Calibration.from_json(calibration)
    return PackedForm({name: known[key] for name, key in weights.items()}, record)
