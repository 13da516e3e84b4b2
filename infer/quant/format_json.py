"""Formats as JSON and back, for files that say what their bytes mean.  No JAX in here.

What comes from a file is checked field by field: a format that is returned can be decoded.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from infer.quant.blocks import FORMATS
from infer.quant.formats import Format, PlanarFormat
from infer.quant.paley import factor

# Codes and the width that they have; integers have any of _INT_BITS.
_CODE_BITS = {"e4m3": 8, "e5m2": 8, "e2m3": 6, "e3m2": 6, "e2m1": 4, "nf4": 4, "fp4": 4}
_INT_BITS = (2, 3, 4, 5, 6, 8)
_SCALES = ("float32", "float16", "bfloat16", "e8m0", "e4m3", "nested")
_ACTIVATIONS = ("", "int8", "int4", "e4m3", "int8_static", "e4m3_static", "e4m3_128", "outliers")
_MAX_NAME = 80
_FIELDS = (
    "name",
    "bits",
    "group",
    "rows",
    "code",
    "symmetric",
    "scale_dtype",
    "activations",
    "ordered",
)
# Fields that files leave out where they have this value, as those before they were there did.
_OPTIONAL = {"rotated": 0}


def to_json(format: Format) -> dict[str, Any]:
    """Return a format as an object: a GGUF type by its name, a planar format field by field."""
    if not isinstance(format, PlanarFormat):
        return {"layout": format.layout, "name": format.name}
    fields = {name: getattr(format, name) for name in _FIELDS}
    for name, usual in _OPTIONAL.items():
        if (value := getattr(format, name)) != usual:
            fields[name] = value
    return {"layout": "planar", **fields}


def from_json(values: Any) -> Format:
    """Return the format that `to_json` described.

    Raises:
        ValueError: it is none, or one that this version does not decode; the message says why.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"a format is {values!r:.60}, must be an object")
    layout, name = values.get("layout"), values.get("name")
    if layout == "blocks":
        if not isinstance(name, str) or name not in FORMATS:
            raise ValueError(f"{name!r:.60} is no GGUF type that is decoded: {', '.join(FORMATS)}")
        return FORMATS[name]
    if layout != "planar":
        raise ValueError(f"layout is {layout!r:.60}; known are 'blocks' and 'planar'")
    values = {**_OPTIONAL, **values}
    problems = _problems(values)
    if problems:
        raise ValueError("; ".join(problems))
    return PlanarFormat(**{field: values[field] for field in (*_FIELDS, *_OPTIONAL)})


def fits(format: Format, shape: tuple[int, int]) -> list[str]:
    """Return why a format from a file cannot be that of a weight (out, in); [] if it can.

    A group wider than its matrix is a block at a ragged edge (128 x 128 for FP8), never more.
    """
    if not isinstance(format, PlanarFormat):
        return []
    limits = (("group", format.group, shape[1]), ("rows", format.rows, shape[0]))
    problems = [
        f"{format.name} has {name} {value}, and the weight {size}"
        for name, value, size in limits
        if value > max(size, 128)
    ]
    if format.rotated and shape[1] % format.rotated:
        problems.append(f"{format.name} turns blocks of {format.rotated}, and rows of {shape[1]}")
    return problems


def _problems(values: Mapping[str, Any]) -> list[str]:
    found = []
    if extra := sorted(map(str, set(values) - {"layout", *_FIELDS, *_OPTIONAL}))[:3]:
        found.append(f"a planar format has no {', '.join(map(repr, extra))}")
    if missing := [name for name in _FIELDS if name not in values]:
        return [*found, f"a planar format needs {', '.join(missing)}"]
    name, code, bits = values["name"], values["code"], values["bits"]
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME or not name.isprintable():
        found.append(f"name is {name!r:.60}, must be 1 to {_MAX_NAME} printable characters")
    if code == "int":
        if type(bits) is not int or bits not in _INT_BITS:
            found.append(f"bits is {bits!r:.40}; integers have {', '.join(map(str, _INT_BITS))}")
    elif not isinstance(code, str) or code not in _CODE_BITS:
        found.append(f"code is {code!r:.40}; known are int, {', '.join(_CODE_BITS)}")
    elif type(bits) is not int or bits != _CODE_BITS[code]:
        found.append(f"bits is {bits!r:.40}, and {code} has {_CODE_BITS[code]}")
    for key, zero in (("group", "all"), ("rows", "all"), ("rotated", "none")):
        if type(values[key]) is not int or values[key] < 0:
            found.append(f"{key} is {values[key]!r:.40}, must be a count, 0 for {zero}")
    if type(values["symmetric"]) is not bool:
        found.append(f"symmetric is {values['symmetric']!r:.40}, must be true or false")
    elif not values["symmetric"] and code != "int":
        found.append(f"symmetric is false, and only integers have a zero point, not {code!r:.40}")
    if type(values["ordered"]) is not bool:
        found.append(f"ordered is {values['ordered']!r:.40}, must be true or false")
    for key, known in (("scale_dtype", _SCALES), ("activations", _ACTIVATIONS)):
        if not isinstance(values[key], str) or values[key] not in known:
            found.append(f"{key} is {values[key]!r:.40}; known are {', '.join(map(repr, known))}")
    if type(values["rotated"]) is int and values["rotated"] > 0:
        try:
            factor(values["rotated"])
        except ValueError as error:
            found.append(f"rotated is {values['rotated']:.3g}: {error}")
    return found


assert set(_FIELDS) | set(_OPTIONAL) == {f.name for f in dataclasses.fields(PlanarFormat)} - {
    "block_bytes",
    "layout",
}
