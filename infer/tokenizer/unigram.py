"""SentencePiece's unigram language model: of all ways to cut a text, the most probable one."""

from functools import lru_cache

from infer.tokenizer.normalizing import SPACE
from infer.tokenizer.score_merge import byte_ids, byte_value, join_unknown, word_border
from infer.tokenizer.vocabulary import TokenType, Vocabulary

_UNKNOWN_PENALTY = 10.0
_CACHED_WORDS = 1 << 16
_CACHED_LEN = 64


class UnigramCodec:
    """The best path by dynamic programming, word by word, with a cache of words.

    A text may be cut before a space wherever no token spans that place: the best path of the whole
    goes through it. Sums are float64; SentencePiece's are float32 along the whole text, so that
    ties within its rounding may fall otherwise in long texts.

    Source: SentencePiece, `unigram_model.cc`, `Model::EncodeOptimized`; Kudo, arXiv 1804.10959.
    """

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        normal = vocabulary.ids_of(TokenType.NORMAL, TokenType.UNDEFINED)
        scores = [vocabulary.scores[i] for i in normal]
        self._unknown_score = min(scores, default=0.0) - _UNKNOWN_PENALTY
        self._scores = {vocabulary.tokens[i]: vocabulary.scores[i] for i in normal}
        best = max(scores, default=0.0)
        for i in vocabulary.ids_of(TokenType.USER_DEFINED):
            text = vocabulary.tokens[i]
            self._scores[text] = len(text.encode()) * max(best, 0.0) - 0.1
        lengths: dict[str, set[int]] = {}
        for text in self._scores:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(found) for first, found in lengths.items()}
        self._byte_ids = byte_ids(vocabulary)
        self._border = word_border(vocabulary.ids)
        self._encode_cached = lru_cache(_CACHED_WORDS)(self._encode_word)

    def encode(self, text: str) -> list[int]:
        """Ids of a text without special tokens; no space is put in front."""
        ids: list[int] = []
        for word in self._border.split(text.replace(" ", SPACE)):
            encode = self._encode_cached if len(word) <= _CACHED_LEN else self._encode_word
            ids.extend(encode(word))
        return ids if self._byte_ids else join_unknown(ids, self._vocabulary.unk_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for."""
        text = self._vocabulary.tokens[token_id]
        kind = self._vocabulary.types[token_id]
        if kind == TokenType.BYTE:
            return bytes([byte_value(text)])
        if kind not in (TokenType.UNKNOWN, TokenType.CONTROL):
            text = text.replace(SPACE, " ")
        return text.encode()

    def _encode_word(self, word: str) -> tuple[int, ...]:
        size, scores = len(word), self._scores
        best = [0.0] + [float("-inf")] * size
        came_from = [0] * (size + 1)
        for start in range(size):
            here, single = best[start], False
            for length in self._lengths.get(word[start], ()):
                end = start + length
                if end > size:
                    break
                score = scores.get(word[start:end])
                if score is None:
                    continue
                single = single or length == 1
                if here + score > best[end]:
                    best[end], came_from[end] = here + score, start
            if not single and here + self._unknown_score > best[start + 1]:
                best[start + 1], came_from[start + 1] = here + self._unknown_score, start
        ids: list[int] = []
        end = size
        while end:
            start = came_from[end]
            ids.extend(reversed(self._piece_ids(word[start:end])))
            end = start
        return tuple(reversed(ids))

    def _piece_ids(self, piece: str) -> list[int]:
        if piece in self._scores:
            return [self._vocabulary.ids[piece]]
        if self._byte_ids:
            return [self._byte_ids[byte] for byte in piece.encode()]
        assert self._vocabulary.unk_id is not None
        return [self._vocabulary.unk_id]
