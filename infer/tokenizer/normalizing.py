"""What a SentencePiece model does to a text before it cuts it into pieces."""

import re
from collections.abc import Iterable

from infer.tokenizer.charsmap import CharsMap
from infer.tokenizer.splitting import TokenSplitter

SPACE = "\u2581"  # SentencePiece's visible space


class TextNormalizer:
    """Replaces by a map, from the left and the longest first; then sees to the spaces.

    User-defined symbols are left as they are. Spaces come out as U+2581.

    Source: SentencePiece, `normalizer.cc`, `Normalizer::Normalize`.

    Args:
        charsmap: the model's `precompiled_charsmap`; empty for none.
        user_defined: symbols that are not touched.
        dummy_prefix: put a space in front.
        remove_extra_whitespaces: no spaces at the ends, and one at a time between.
    """

    def __init__(
        self,
        *,
        charsmap: bytes = b"",
        user_defined: Iterable[str] = (),
        dummy_prefix: bool = True,
        remove_extra_whitespaces: bool = False,
    ):
        self.dummy_prefix = dummy_prefix
        self.remove_extra_whitespaces = remove_extra_whitespaces
        self._charsmap = CharsMap(charsmap)
        self._user_defined = TokenSplitter({text: i for i, text in enumerate(user_defined)})

    def __call__(self, text: str) -> str:
        """The normalised text."""
        if not text:
            return ""
        text = self._mapped(text)
        if self.remove_extra_whitespaces:
            text = re.sub("  +", " ", text).strip(" ")
        prefix = " " if self.dummy_prefix and (text or not self.remove_extra_whitespaces) else ""
        text = (prefix + text).replace(" ", SPACE)
        return text.rstrip(SPACE) if self.remove_extra_whitespaces else text

    def _mapped(self, text: str) -> str:
        """The text with its characters replaced; a user-defined symbol comes before any key."""
        out: list[str] = []
        done = at = 0
        symbols = self._user_defined.places(text)
        symbol = next(symbols, None)
        while found := self._charsmap.starts.search(text, at):
            at = found.start()
            while symbol is not None and symbol[1] <= at:
                symbol = next(symbols, None)
            if symbol is not None and symbol[0] <= at:
                at = symbol[1]
                continue
            length, new = self._charsmap.longest(text, at)
            if length:
                out += (text[done:at], new)
                done = at + length
            at += length or 1
        out.append(text[done:])
        return "".join(out)
