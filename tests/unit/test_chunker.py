"""Chunks of a text by a rule: where they end, and what holds for every text."""

from __future__ import annotations

import itertools
import re
import time

import pytest
import regex
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sie_contracts import chunker
from sie_contracts.wire.messages import BOUNDARIES, Boundary, ChunkRule

PROSE = (
    "Dr. Smith met Mr. Jones at 3 p.m. on Monday. He paid $3.50, i.e. too much. They left.\n\n"
    "Next day it rained. Nobody came. The shop, e.g. the one of Prof. Gray, was closed."
)
MARKDOWN = (
    "# Title 1. of all\n\nIntroduction here. It has two sentences.\n\n"
    "```py\nx = 1. \n\ny = 2. \n```\n\n"
    "| name | text |\n|---|---|\n| a. b | One. Two. |\n| c | Three. |\n\n"
    "- first item. With more.\n- second item\n\nThe end. Really."
)


def ends_of(text: str) -> list[int]:
    """Return the ends of words and marks, as a tokenizer finds them."""
    return [match.end() for match in re.finditer(r"\w+|[^\w\s]", text)]


def cut(text: str, most: int, boundary: Boundary = "sentence", overlap: int = 0, least: int = 0) -> list[str]:
    rule = ChunkRule(most, overlap, boundary, least)
    return [text[first:end] for first, end in chunker.spans(text, ends_of(text), rule)]


def test_a_chunk_ends_with_a_sentence_and_no_abbreviation() -> None:
    assert cut(PROSE, 18) == [
        "Dr. Smith met Mr. Jones at 3 p.m. on Monday. ",
        "He paid $3.50, i.e. too much. They left.\n\n",
        "Next day it rained. Nobody came. ",
        "The shop, e.g. the one of Prof. Gray, was closed.",
    ]


def test_code_tables_and_headings_are_not_cut() -> None:
    chunks = cut(MARKDOWN, 30)
    for whole in (
        "```py\nx = 1. \n\ny = 2. \n```",
        "| a. b | One. Two. |\n| c | Three. |",
        "# Title 1. of all\n\nIntro",
    ):
        assert sum(whole in chunk for chunk in chunks) == 1


def test_a_heading_stays_with_the_paragraph_below_it() -> None:
    text = "First words are here.\n\n## Heading\n\nBelow it are more words."
    assert cut(text, 9) == ["First words are here.\n\n", "## Heading\n\nBelow it are more words."]


def test_a_table_that_does_not_fit_is_cut_between_lines() -> None:
    table = "".join(f"| {number}. a | b. c |\n" for number in range(8))
    assert all(chunk.startswith("|") and chunk.endswith("|\n") for chunk in cut(table, 30))


def test_a_list_is_cut_between_items() -> None:
    text = "".join(f"- item number {number} of the list\n" for number in range(6))
    assert all(chunk.startswith("- item") for chunk in cut(text, 15))


def test_a_language_without_spaces_is_cut_at_its_own_marks() -> None:
    text = "你好。我是谁？再见！" * 3
    assert [len(chunk) for chunk in cut_by_letter(text, 10)] == [10, 10, 10]
    assert {chunk[-1] for chunk in cut_by_letter(text, 8)} == set("。？！")


def cut_by_letter(text: str, most: int) -> list[str]:
    ends = list(range(1, len(text) + 1))
    return [text[first:end] for first, end in chunker.spans(text, ends, ChunkRule(most))]


def test_a_sentence_that_does_not_fit_is_cut_between_words() -> None:
    text = "one two three four five six seven eight nine ten"
    letters = cut_by_letter(text, 12)
    assert all(chunk.endswith(" ") for chunk in letters[:-1])


@pytest.mark.parametrize("family", ["👩‍👩‍👧‍👦", "e\u0301\u0302", "🇩🇪", "\u1112\u1161\u11ab"])
def test_a_grapheme_is_never_cut(family: str) -> None:
    for chunk in cut_by_letter(family * 5, 1):
        assert chunk == family


def test_a_short_sentence_is_joined_with_more_to_have_the_least_tokens() -> None:
    text = "Stop it. " + "Long words follow here without any end in sight and they go on " * 3
    assert ends_of(cut(text, 10)[0]) != ends_of(cut(text, 10, least=5)[0])
    assert all(len(ends_of(chunk)) >= 5 for chunk in cut(text, 10, least=5)[:-1])


def test_an_overlap_repeats_whole_sentences() -> None:
    text = "One two. Three four. Five six. Seven eight. Nine ten."
    assert cut(text, 9, overlap=3) == ["One two. Three four. Five six. ", "Five six. Seven eight. Nine ten."]


def test_an_overlap_gives_way_to_a_sentence_that_would_not_fit() -> None:
    text = "One two. Three four. Five six seven eight nine."
    assert cut(text, 6, overlap=3) == ["One two. Three four. ", "Five six seven eight nine."]


@pytest.mark.parametrize("space", "\u00a0\u2003\u2028\u2029\u3000\x85")
def test_white_space_outside_of_ascii_ends_a_sentence_like_a_space(space: str) -> None:
    texts = [f"See Appendix A{between}. Next one.{between}The last." for between in (" ", space)]
    plain, wide = (list(chunker.spans(text, ends_of(text), ChunkRule(6))) for text in texts)
    assert (len(plain) > 1, wide) == (True, plain)


TEXTS = st.lists(
    st.one_of(
        st.sampled_from(
            (
                "Dr. No. ",
                "A b. ",
                "\n\n",
                "\r\n",
                "```\n",
                "| a |\n",
                "- ",
                "# h\n",
                "你好。",
                "👩‍👩‍👧",
                "🇩",
                "\u0301",
                " ",
                "e.g. ",
                "x",
            )
        ),
        st.text(max_size=12),
    ),
    max_size=40,
).map("".join)


@given(
    text=TEXTS,
    most=st.integers(1, 12),
    boundary=st.sampled_from(BOUNDARIES),
    overlap=st.integers(0, 6),
    least=st.integers(0, 12),
)
@example(text="🇩🇪🇩🇪🇩\u0301🇪\u0600🇩🇪🇩 🇩🇪\u200d🇩🇪", most=1, boundary="token", overlap=0, least=0)
@example(text="\u0301\r\n👩‍👩‍👧 a", most=1, boundary="token", overlap=0, least=0)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_chunks_of_any_text_hold_their_rule(text: str, most: int, boundary: Boundary, overlap: int, least: int) -> None:
    ends = ends_of(text)
    rule = ChunkRule(most, min(overlap, most // 2), boundary, min(least, most))
    chunks = list(chunker.spans(text, ends, rule))
    assert chunks == list(chunker.spans(text, ends, rule))
    if not ends:
        assert chunks == []
        return
    graphemes = {match.start() for match in regex.finditer(r"\X", text)} | {len(text)}
    assert chunks[0][0] == 0
    assert chunks[-1][1] == len(text)
    for before, after in itertools.pairwise(chunks):
        assert before[0] < after[0] <= before[1] < after[1]
        repeated = [end for end in ends if after[0] < end <= before[1]]
        assert len(repeated) <= rule.overlap_tokens
        if not rule.overlap_tokens:
            assert before[1] == after[0]
    for first, end in chunks:
        assert {first, end} <= graphemes
        own = [place for place in ends if first < place <= end]
        assert own or first == 0
        inner = [place for place in ends if first < place < end and place in graphemes]
        assert len(own) <= most or len(inner) <= most


@pytest.mark.parametrize("piece", ["`", '"(. ', "|a|\n", "- a\n  - b\n"])
def test_the_time_of_a_hostile_text_grows_with_its_length(piece: str) -> None:
    """A text of eight times the length takes at most twenty times the time; if it were quadratic, 64 times."""

    def seconds(characters: int) -> float:
        text = (piece * characters)[:characters]
        ends = ends_of(text) or [len(text)]
        times_s = []
        for _ in range(3):
            began_s = time.thread_time()
            list(chunker.spans(text, ends, ChunkRule(64)))
            times_s.append(time.thread_time() - began_s)
        return min(times_s)

    assert seconds(32_000) < 20 * seconds(4000)
