from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.text.stops import StopScanner

letters = st.text("ab]^", max_size=30)
stop_lists = st.lists(st.text("ab]^", min_size=1, max_size=5), max_size=4)


def reference(text: str, stops: list[str]) -> tuple[str, bool]:
    """The match that ends first; of those that end together, the longest."""
    found = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    if not found:
        return text, False
    return text[: min(found)[1]], True


def scan(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    scanner = StopScanner(stops)
    out, stopped = "", False
    for piece in pieces:
        emitted, stopped = scanner.push(piece)
        out += emitted
    return out + scanner.flush(), stopped


@given(st.lists(letters, max_size=6), stop_lists)
@settings(max_examples=400, deadline=None)
def test_any_chunking_equals_a_search_of_the_whole(pieces: list[str], stops: list[str]) -> None:
    whole = "".join(pieces)
    assert scan(pieces, stops)[0] == reference(whole, stops)[0]
    assert scan(list(whole), stops)[0] == reference(whole, stops)[0]
    if pieces:
        assert scan(pieces, stops)[1] == reference(whole, stops)[1]


@given(st.lists(letters, max_size=6), stop_lists)
@settings(max_examples=150, deadline=None)
def test_never_holds_back_more_than_it_must(pieces: list[str], stops: list[str]) -> None:
    scanner = StopScanner(stops)
    seen = out = ""
    for piece in pieces:
        emitted, stopped = scanner.push(piece)
        seen, out = seen + piece, out + emitted
        if stopped:
            return
        held = seen[len(out) :]
        assert held == "" or any(s.startswith(held) and s != held for s in stops)


def test_what_is_held_comes_out_at_the_end() -> None:
    scanner = StopScanner(["###"])
    assert scanner.push("answer##") == ("answer", False)
    assert scanner.flush() == "##"


def test_nothing_comes_after_a_match() -> None:
    scanner = StopScanner(["\n\n"])
    assert scanner.push("one\n") == ("one", False)
    assert scanner.push("\ntwo") == ("", True)
    assert scanner.push("three") == ("", True)
    assert scanner.flush() == ""


def test_the_match_that_is_complete_first_wins() -> None:
    assert scan(["abcd"], ["abcd", "bc"]) == ("a", True)
    assert scan(["xabc"], ["bc", "abc"]) == ("x", True)


def test_an_empty_stop_string_is_our_bug() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopScanner([""])
