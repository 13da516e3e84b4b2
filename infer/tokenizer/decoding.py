"""Tokens to text as they come: no character is shown before all of its bytes are there."""

import codecs
from typing import TYPE_CHECKING, SupportsIndex

if TYPE_CHECKING:
    from infer.tokenizer.tokenizer import Tokenizer

_utf8 = codecs.getincrementaldecoder("utf-8")


class DecodeStream:
    """Decodes one sequence, a token at a time.

    The texts of `put` and the text of `flush`, joined, are `Tokenizer.decode` of the same ids with
    the same options. It knows nothing of the prompt, so no prompt text can come out of it.

    Args:
        tokenizer: whose ids they are.
        skip_special_tokens: leave the text of special tokens out.
        continuation: the ids follow a prompt, so a space in front of the first word is text.
            Otherwise it is taken away where the tokenizer puts one in front of every text.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        *,
        skip_special_tokens: bool = True,
        continuation: bool = False,
    ):
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._strip_space = tokenizer.add_space_prefix and not continuation
        self._decoder = _utf8(errors="replace")

    def put(self, token_id: SupportsIndex) -> str:
        """Take the next token; return the text that is complete now and was not returned before.

        Raises:
            RequestError: the id is not one of the vocabulary.
        """
        return self._decoder.decode(self.visible_bytes(token_id))

    def flush(self) -> str:
        """End the sequence; return what its unfinished last character gives, U+FFFD or nothing."""
        tail = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return tail

    def visible_bytes(self, token_id: SupportsIndex) -> bytes:
        """The bytes that the next token adds to the text."""
        piece = self._tokenizer.token_bytes(token_id)
        if token_id in self._tokenizer.special_ids:
            return b"" if self._skip_special else piece
        if self._strip_space:
            self._strip_space = False
            return piece.removeprefix(b" ")
        return piece
