"""The texts of the package: what the licence file says of them is so, and each is long enough."""

import hashlib
import re
import unicodedata
from importlib import resources
from pathlib import Path

import pytest

from infer.errors import ConfigError
from infer.eval import BUILT_IN, read_text
from infer.eval.texts import LANGUAGES

_ROW = re.compile(r"^\| (\w+)\.txt \| \w+ \| (\d+) \| \d+ \| ([0-9a-f]{64}) \|$", re.MULTILINE)


def test_the_files_are_those_of_their_licence_page() -> None:
    folder = resources.files("infer.eval") / "corpora"
    page = (folder / "README.md").read_text("utf-8")
    assert "Creative Commons Attribution-ShareAlike 3.0" in page
    rows = _ROW.findall(page)
    assert [code for code, _, _ in rows] == list(LANGUAGES)
    for code, size, digest in rows:
        data = (folder / f"{code}.txt").read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (int(size), digest)


@pytest.mark.parametrize(
    ("name", "script", "bytes_per_letter"),
    [("en", "LATIN", 1), ("te", "TELUGU", 3), ("ja", ("CJK", "HIRAGANA", "KATAKANA"), 3),
     ("ru", "CYRILLIC", 2)],
)  # fmt: skip
def test_each_language_is_in_its_own_script(name: str, script, bytes_per_letter: int) -> None:
    text = read_text(name)
    letters = [c for c in text if c.isalpha()]
    own = sum(unicodedata.name(c, "").startswith(script) for c in letters)
    assert own > 0.85 * len(letters)
    assert len(text.encode()) > 90_000
    # The densest tokenizers reach about 4 letters a token: 50 windows of 256 and more.
    assert len(text) > 50 * 256 * (4 if bytes_per_letter == 1 else 2)
    lines = [line for line in text.split("\n") if line]
    assert len(set(lines)) == len(lines)


def test_the_standard_library_is_code() -> None:
    text = read_text("python-stdlib")
    assert 60_000 < len(text.encode()) < 125_000
    assert text.count("def ") > 100
    assert text == read_text("python-stdlib")


def test_files_are_read_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes("a\r\nb é".encode())
    assert read_text(file) == "a\r\nb é"
    file.write_bytes(b"abc\xff")
    with pytest.raises(ConfigError, match="not UTF-8 at byte 3"):
        read_text(file)
    file.write_bytes(b" \n")
    with pytest.raises(ConfigError, match="no text in it"):
        read_text(file)
    with pytest.raises(ConfigError, match=", ".join(BUILT_IN)):
        read_text(tmp_path / "missing.txt")
