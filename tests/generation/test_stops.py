"""Stop strings over token borders (case T02)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.generation.stops import StopMatcher


def _run(
    pieces: list[str], stops: list[str], include: bool = False
) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops, include)
    out = []
    for piece in pieces:
        out.append(matcher.put(piece))
        if matcher.matched is not None:
            return out, matcher.matched
    return [*out, matcher.flush()], None


@pytest.mark.parametrize(
    ("pieces", "stops", "text"),
    [
        (["ABC", "DEF", "G", "HI", "J!", "x"], ["DEFGHIJ"], "ABC"),
        (["?\n"], ["\n"], "?"),
        (["UNO ", "DUE ", "TRE"], ["TRE\nAAAA"], "UNO DUE TRE"),
        ([" Ali", "ce", "!"], ["\n", "Alice:"], " Alice!"),
        (["abcabd"], ["abd"], "abc"),
        (["xaab"], ["aab", "ab"], "x"),
        (["one two"], ["two", "one"], ""),
    ],
)
def test_text_is_cut_before_the_first_stop(pieces, stops, text) -> None:
    out, _ = _run(pieces, stops)
    assert "".join(out) == text
    by_character, _ = _run(list("".join(pieces)), stops)
    assert "".join(by_character) == text


def test_the_stop_itself_is_kept_when_asked_for_and_nothing_after_it() -> None:
    out, matched = _run(["ABC", "DEF", "G", "HI", "J!"], ["DEFGHIJ"], include=True)
    assert "".join(out) == "ABCDEFGHIJ"
    assert matched == "DEFGHIJ"


def test_nothing_of_a_stop_leaks_while_it_grows() -> None:
    matcher = StopMatcher(["DEFGHIJ"])
    assert [matcher.put(p) for p in ("ABC", "DEF", "G", "HI")] == ["ABC", "", "", ""]
    assert matcher.put("X") == "DEFGHIX"


@given(
    st.lists(st.text("ab", max_size=4), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_pieces_do_not_matter_and_the_cut_is_the_earliest_completed_stop(pieces, stops) -> None:
    out, matched = _run(pieces, stops)
    whole = "".join(pieces)
    ends = {whole.find(s) + len(s) for s in stops if s in whole}
    if not ends:
        assert ("".join(out), matched) == (whole, None)
    else:
        first = min(ends)
        longest = max((s for s in stops if whole[:first].endswith(s)), key=len)
        assert ("".join(out), matched) == (whole[: first - len(longest)], longest)
