"""Stop strings over token borders.

Text that could still become a stop string is held back: the longest end of the text that is a
proper beginning of any stop.  At the end of the output what is held is given out once.
"""

from collections.abc import Sequence


class StopMatcher:
    """Follows one growing text and finds the first stop string in it.

    The earliest match wins; of matches that begin together, the one that is complete first.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self.stops, self.include = tuple(stops), include
        self.matched: str | None = None
        self._held = ""

    def put(self, piece: str) -> str:
        """Take the next piece of text; return what is certain to be output.

        Once `matched` is set the text is complete, and nothing more may be put.
        """
        # Character by character: a stop that ends inside the piece ends the text there.
        out = []
        for character in piece:
            self._held += character
            found = [stop for stop in self.stops if self._held.endswith(stop)]
            if found:
                # The longest begins earliest.
                self.matched = max(found, key=len)
                kept = self._held if self.include else self._held[: -len(self.matched)]
                self._held = ""
                return "".join([*out, kept])
            keep = self._overlap()
            cut = len(self._held) - keep
            out.append(self._held[:cut])
            self._held = self._held[cut:]
        return "".join(out)

    def flush(self) -> str:
        """Return the text that was held back, at the end of the output."""
        held, self._held = self._held, ""
        return held

    def _overlap(self) -> int:
        """Return the length of the longest end of the held text that begins a stop."""
        longest = max(map(len, self.stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-length:]
            if any(stop.startswith(end) for stop in self.stops):
                return length
        return 0
