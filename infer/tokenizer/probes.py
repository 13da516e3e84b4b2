"""Texts on which two tokenizers are held against each other when one is made from the other.

llama.cpp's converter tells pre-tokenizers apart in the same way, by what they make of one text.
"""

from infer.errors import WeightFormatError
from infer.tokenizer.tokenizer import Tokenizer

TEXTS = (
    "Hello, world! It's 2024; we've 1234567 reasons (or 3.14159).",
    "  leading spaces, \t tabs\n\n and   runs \n \n\n\n of    them   ",
    "I'M HE'LL they'd Don'T 'tis 'ſ O'Reilly's",
    "def f(x):\n    return x**2 + y[0] != {'a': 1}  # comment\r\n\tif __name__ == '__main__':",
    "ünïcödé straße Ωmega Привет, мир! κόσμε ǅ aÀb ÀÉÎ",
    "你好，世界。こんにちは カタカナ 안녕하세요 ㄱㄴ ไทย भारत العربية עברית",
    "🚀🚀 👩‍👩‍👧 ✅ (normal) 😶‍🌫️ ﷽ … “quotes” — –",
    "3 33 333 3333 33333 333333 3333333 33333333 3.3 3..3 1,000,000 ½ ² ٣٤",
    "CamelCaseWords snake_case_words kebab-case HTTPServer a.b.c x=y;z",
    "<sentinel:3> IMGIMGAB1Z a@b.org https://x.org/y?z=1&w=%20 $100 50% #tag ^~`|",
    "\u00a0nbsp\u3000wide\u200bzero e\u0301 combining \ufeff",
    "------ ====== ****** !!!??? ... ,,, ((())) //path//to ''''''```````",
    "a\n b\r\n c\r d\u2028e    \n    f",
    "x",
    " x",
    "antidisestablishmentarianism Donaudampfschifffahrt supercalifragilistic",
)


def with_special(tokens: list[str]) -> list[str]:
    """Return texts in which special tokens stand among others, as a chat template writes them."""
    return [f"{token}user\nWhat is it?{token}\n and{token}more {token}" for token in tokens]


def check(old: Tokenizer, new: Tokenizer, what: str) -> None:
    """Hold a tokenizer against the one that it was made from.

    Args:
        old: The one it was made from.
        new: The one that was made.
        what: How the message begins.

    Raises:
        WeightFormatError: They give different ids for one of the texts.
    """
    special = sorted(old.special_ids & new.special_ids)[:40]
    named = [old.token_bytes(i).decode(errors="replace") for i in special]
    for text in (*TEXTS, *with_special(named)):
        for parse in (False, True):
            have, want = (t.encode(text, parse_special=parse) for t in (new, old))
            if have != want:
                at = next(
                    (i for i, (a, b) in enumerate(zip(have, want, strict=False)) if a != b),
                    min(len(have), len(want)),
                )
                raise WeightFormatError(
                    f"{what} the tokenizer gives other ids for {text!r:.60}, the first at {at}:"
                    f" {have[at : at + 3]}, before {want[at : at + 3]}; keep the file as it is"
                )
