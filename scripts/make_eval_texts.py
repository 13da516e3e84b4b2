"""Make the texts of infer/eval/corpora from GNOME's user documentation (CC BY-SA 3.0).

    apt-get download gnome-user-docs && dpkg-deb -x gnome-user-docs_*.deb extracted
    python scripts/make_eval_texts.py extracted

Every language has the same pages in its own words.  A paragraph is a line, a page ends with an
empty one.  Paragraphs that the translators left in English, and those that came before, are left
out; pages are taken in the order of a fixed hash of their names, which mixes the subjects, until a
text has its bytes.  The people who wrote and translated those pages are named in README.md.
"""

import argparse
import hashlib
import unicodedata
import xml.etree.ElementTree as xml
from pathlib import Path

CORPORA = Path(__file__).parents[1] / "infer" / "eval" / "corpora"
PACKAGE = "gnome-user-docs 43.0-2"
# Folder of the package, and the word that its letters' Unicode names begin with.
LANGUAGES = {
    "en": ("C", "English", ("LATIN",)),
    "te": ("te", "Telugu", ("TELUGU",)),
    "ja": ("ja", "Japanese", ("CJK", "HIRAGANA", "KATAKANA")),
    "ru": ("ru", "Russian", ("CYRILLIC",)),
}
BYTES = 120_000
# Letters of the language's own script in a paragraph that counts as translated.
OWN_LETTERS = 0.6
LEAST_BYTES = 40  # shorter paragraphs are names of menus

README = """# Texts for evaluation

Made by `scripts/make_eval_texts.py` from GNOME's user documentation (Debian package
{package}), © the people named below. Paragraphs were selected and stripped of markup; the words are
theirs. Licence of these files: Creative Commons Attribution-ShareAlike 3.0 Unported
(https://creativecommons.org/licenses/by-sa/3.0/), not the licence of the code around them.

| file | language | bytes | pages | SHA-256 |
|---|---|---|---|---|
{rows}

{people}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("extracted", type=Path, help="folder into which dpkg-deb -x wrote")
    root = parser.parse_args().extracted / "usr" / "share" / "help"
    rows, people = [], []
    for code, (folder, language, scripts) in LANGUAGES.items():
        text, pages, names = text_of(root / folder / "gnome-help", scripts)
        data = text.encode()
        (CORPORA / f"{code}.txt").write_bytes(data)
        digest = hashlib.sha256(data).hexdigest()
        rows.append(f"| {code}.txt | {language} | {len(data)} | {pages} | {digest} |")
        people.append(f"{language}: {', '.join(names)}.")
    filled = README.format(package=PACKAGE, rows="\n".join(rows), people="\n\n".join(people))
    (CORPORA / "README.md").write_text(filled)


def text_of(folder: Path, scripts: tuple[str, ...]) -> tuple[str, int, list[str]]:
    """Return the text of one language, the pages it is from, and who made them."""
    order = lambda path: hashlib.sha256(path.name.encode()).digest()
    seen: set[str] = set()
    names: dict[str, None] = {}
    parts, size, pages = [], 0, 0
    for path in sorted(folder.glob("*.page"), key=order):
        root = xml.parse(path).getroot()
        lines = [line for line in paragraphs(root) if translated(line, scripts)]
        lines = [line for line in dict.fromkeys(lines) if line not in seen]
        if not lines:
            continue
        seen.update(lines)
        page = "\n".join(lines) + "\n\n"
        size += len(page.encode())
        if size > BYTES:
            break
        parts.append(page)
        pages += 1
        names |= dict.fromkeys(credits_of(root))
    return "".join(parts), pages, sorted(names)


def paragraphs(root: xml.Element) -> list[str]:
    """Return the titles and paragraphs of a page, in order, as plain text."""
    found = []
    for element in root.iter():
        if local(element) in ("title", "p"):
            text = " ".join("".join(element.itertext()).split())
            if len(text.encode()) >= LEAST_BYTES:
                found.append(unicodedata.normalize("NFC", text))
    return found


def translated(text: str, scripts: tuple[str, ...]) -> bool:
    """Return whether most letters are of the language's own script."""
    letters = [c for c in text if c.isalpha()]
    own = sum(unicodedata.name(c, "").startswith(scripts) for c in letters)
    return bool(letters) and own >= OWN_LETTERS * len(letters)


def credits_of(root: xml.Element) -> list[str]:
    """Return the names in the page's credits."""
    names = []
    for credit in root.iter():
        if local(credit) == "credit":
            names += [x.text.strip() for x in credit if local(x) == "name" and x.text]
    return [name for name in names if name]


def local(element: xml.Element) -> str:
    """Return an element's name without its namespace."""
    return str(element.tag).rpartition("}")[2]


if __name__ == "__main__":
    main()
