"""SentencePiece's unigram language model: of all ways to cut a text, the most probable one."""

from array import array

from infer.tokenizer.normalizing import SPACE
from infer.tokenizer.score_merge import byte_ids, byte_value, join_unknown
from infer.tokenizer.vocabulary import TokenType, Vocabulary

_UNKNOWN_PENALTY = 10.0


class UnigramCodec:
    """The best path by dynamic programming: O(characters x lengths of tokens).

    Ties are common (`!!!` as `!`, `!!` or `!!`, `!`), and SentencePiece decides them by the
    rounding of its sums, float32 from the text's beginning; so the sums here are the same.

    Source: SentencePiece, `unigram_model.cc`, `Model::EncodeOptimized`; Kudo, arXiv 1804.10959.
    """

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        normal = vocabulary.ids_of(TokenType.NORMAL, TokenType.UNDEFINED)
        scores = [vocabulary.scores[i] for i in normal]
        self._unknown_score = _float32(min(scores, default=0.0) - _UNKNOWN_PENALTY)
        self._scores = {vocabulary.tokens[i]: vocabulary.scores[i] for i in normal}
        # No log-probability is higher, so user-defined symbols are as good as always taken.
        self._scores |= dict.fromkeys(
            (vocabulary.tokens[i] for i in vocabulary.ids_of(TokenType.USER_DEFINED)), 0.0
        )
        lengths: dict[str, set[int]] = {}
        for text in self._scores:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(found) for first, found in lengths.items()}
        self._byte_ids = byte_ids(vocabulary)

    def encode(self, text: str) -> list[int]:
        """Ids of a text without special tokens; no space is put in front."""
        text = text.replace(" ", SPACE)
        came_from = self._best_path(text)
        ids: list[int] = []
        end = len(text)
        while end:
            start = came_from[end]
            ids.extend(reversed(self._piece_ids(text[start:end])))
            end = start
        ids.reverse()
        return ids if self._byte_ids else join_unknown(ids, self._vocabulary.unk_id)

    def _best_path(self, text: str) -> list[int]:
        """For each place in the text, where the last piece of the best path to it begins."""
        size, scores, lengths, unknown = len(text), self._scores, self._lengths, self._unknown_score
        best = array("f", [0.0]) * (size + 1)  # storing rounds to float32
        came_from = [-1] * (size + 1)
        candidate = array("f", [0.0])
        for start in range(size):
            here, single = best[start], False
            for length in lengths.get(text[start], ()):
                end = start + length
                if end > size:
                    break
                score = scores.get(text[start:end])
                if score is None:
                    continue
                if length == 1:
                    single = True
                candidate[0] = here + score
                if came_from[end] < 0 or candidate[0] > best[end]:
                    best[end] = candidate[0]
                    came_from[end] = start
            if not single:
                end = start + 1
                candidate[0] = here + unknown
                if came_from[end] < 0 or candidate[0] > best[end]:
                    best[end] = candidate[0]
                    came_from[end] = start
        return came_from

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for."""
        text = self._vocabulary.tokens[token_id]
        kind = self._vocabulary.types[token_id]
        if kind == TokenType.BYTE:
            return bytes([byte_value(text)])
        if kind not in (TokenType.UNKNOWN, TokenType.CONTROL):
            text = text.replace(SPACE, " ")
        return text.encode()

    def _piece_ids(self, piece: str) -> list[int]:
        if piece in self._scores:
            return [self._vocabulary.ids[piece]]
        if self._byte_ids:
            return [self._byte_ids[byte] for byte in piece.encode()]
        assert self._vocabulary.unk_id is not None
        return [self._vocabulary.unk_id]


def _float32(value: float) -> float:
    return array("f", [value])[0]
