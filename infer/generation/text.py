"""The text of one row as its tokens come: decoded incrementally, cut at stop strings."""

from infer.generation.prepare import TextCodec
from infer.generation.stops import StopMatcher
from infer.sampling import SamplingParams


class RowText:
    """The text of one row.

    `text` is all that may be shown so far; `stop` the stop string that ended it, and `stop_length`
    the number of tokens up to and including the one that completed it.
    """

    def __init__(self, tokenizer: TextCodec, sampling: SamplingParams) -> None:
        self._decoder = tokenizer.stream(
            skip_special_tokens=sampling.skip_special_tokens, continuation=True
        )
        self._matcher = StopMatcher(sampling.stop, sampling.include_stop_str_in_output)
        self._seen = 0
        self._flushed = False
        self.text = ""
        self.stop_length: int | None = None

    @property
    def stop(self) -> str | None:
        """The stop string that has appeared, or None."""
        return self._matcher.matched

    def put(self, ids: list[int], ended: bool) -> str:
        """Take all of the row's ids so far; return the text that is new since the last call."""
        new = []
        while self.stop is None and self._seen < len(ids):
            new.append(self._matcher.put(self._decoder.put(ids[self._seen])))
            self._seen += 1
            if self.stop is not None:
                self.stop_length = self._seen
        if ended and self.stop is None and not self._flushed:
            self._flushed = True
            new.append(self._matcher.put(self._decoder.flush()))
            if self.stop is None:
                new.append(self._matcher.flush())
            else:
                self.stop_length = self._seen
        piece = "".join(new)
        self.text += piece
        return piece
