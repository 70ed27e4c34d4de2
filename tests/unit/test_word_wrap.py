"""Word wrapping of an answer that comes in pieces."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from deploy.word_wrap import Run, WordWrapper

TEXTS = st.text(alphabet="abcdefgh   .\n\té日本🎉", max_size=120)
WIDTHS = st.integers(min_value=4, max_value=30)


def wrapped(pieces: list[tuple[str, str]], width: int) -> list[Run]:
    wrapper = WordWrapper()
    runs = [run for text, style in pieces for run in wrapper.feed(text, style, width)]
    return [*runs, *wrapper.finish(width)]


def written(text: str, width: int) -> str:
    return "".join(part for part, _ in wrapped([(text, "")], width))


def test_lines_break_between_words_wherever_the_pieces_end() -> None:
    pieces = ["The quick bro", "wn", " fox", " jumps", " over the ", "lazy dog."]
    runs = wrapped([(piece, "") for piece in pieces], 16)
    assert "".join(text for text, _ in runs) == "The quick brown\nfox jumps over\nthe lazy dog."


def test_the_lines_and_the_indentation_of_an_answer_are_kept() -> None:
    assert written("def f():\n    return 1\n\n\tdone", 20) == "def f():\n    return 1\n\n        done"


def test_a_word_longer_than_a_line_is_broken_at_the_edge() -> None:
    assert written("see abcdefghijklmnop now", 6) == "see\nabcdef\nghijkl\nmnop\nnow"


def test_lines_break_between_wide_characters() -> None:
    assert written("日本語のテキスト end", 6) == "日本語\nのテキ\nスト\nend"


@given(TEXTS, WIDTHS)
def test_no_line_is_too_long(text: str, width: int) -> None:
    assert max(map(cell_len, written(text, width).split("\n"))) <= width


@given(st.lists(st.text(alphabet="abc", min_size=1, max_size=8), max_size=20), st.integers(8, 30))
def test_no_word_that_fits_into_a_line_is_broken(words: list[str], width: int) -> None:
    assert written(" ".join(words), width).split() == words


@given(TEXTS, WIDTHS)
def test_nothing_is_lost_but_blanks(text: str, width: int) -> None:
    assert "".join(written(text, width).split()) == "".join(text.split())


@given(TEXTS, st.lists(st.integers(0, 120)), WIDTHS)
def test_pieces_change_nothing_and_each_character_keeps_its_style(text: str, cuts: list[int], width: int) -> None:
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [(text[a:b], f"style-{a}") for a, b in pairwise(edges)]
    runs = wrapped(pieces, width)
    assert "".join(part for part, _ in runs) == written(text, width)
    visible = [(char, style) for part, style in runs for char in part if not char.isspace()]
    assert visible == [(char, style) for part, style in pieces for char in part if not char.isspace()]
