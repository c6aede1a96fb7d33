"""Redaction without a model: patterns and their checks, the rule for overlaps, styles, offsets, restoration."""

from __future__ import annotations

import itertools
import random
import re
import time
from typing import Any, get_args

import pytest
from redaction_texts import CARD, EMAIL, IBAN, IPV4, IPV6, PHONE, VALUES, random_entities, random_text, redacted_slot

from sie_client import InvalidInputError, restore
from sie_contracts.api.inference import Offsets, RedactionStyle
from sie_contracts.errors import InferenceFailed
from sie_gateway.dialects import redact
from sie_gateway.dialects.redact import RedactionRules
from sie_gateway.redaction import patterns
from sie_gateway.redaction.patterns import KINDS, pattern_of, ranges_of
from sie_gateway.redaction.replacements import MASK, Replacer
from sie_gateway.redaction.spans import SensitiveSpan, disjoint, utf16_offsets

STYLES = get_args(RedactionStyle)
MEGABYTE = 1 << 20


def rules(style: Any = "tag", *kinds: str, region: str = "", offsets: str = "code_points") -> RedactionRules:
    return RedactionRules(kinds, style, b"k" * 32, region, offsets)


def values_of(text: str, kind: str, region: str = "") -> list[str]:
    places = ranges_of(text, [kind], region)
    spans = disjoint(SensitiveSpan(start, end, name, None, "pattern") for name, start, end in places)
    return [text[span.start : span.end] for span in spans]


# patterns

FORMS: list[tuple[str, str, str]] = [
    ("card_number", "a 4111111111111111 b", "4111111111111111"),
    ("card_number", f"a {CARD}.", CARD),
    ("card_number", "a 4111-1111-1111-1111 2027", "4111-1111-1111-1111"),
    ("card_number", "a 3782 822463 10005", "3782 822463 10005"),
    ("card_number", "a 3056 930902 5904", "3056 930902 5904"),
    ("card_number", "2027 4111\u00a01111\u00a01111\u00a01111", "4111\u00a01111\u00a01111\u00a01111"),
    ("card_number", "٤١١١ ١١١١ ١١١١ ١١١١", "٤١١١ ١١١١ ١١١١ ١١١١"),
    ("iban", f"to {IBAN} now", IBAN),
    ("iban", "to gb82west12345698765432, now", "gb82west12345698765432"),
    ("iban", "NO93 8601 1117 947 is it", "NO93 8601 1117 947"),
    ("iban", "MT84 MALT 0110 0001 2345 MTLC AST0 01S", "MT84 MALT 0110 0001 2345 MTLC AST0 01S"),
    ("email", f"mail {EMAIL}.", EMAIL),
    ("email", "<o'neil+x@a-b.co.uk>", "o'neil+x@a-b.co.uk"),
    ("email", "زيد@مثال.السعودية", "زيد@مثال.السعودية"),
    ("email", "jose\u0301@example.org", "jose\u0301@example.org"),
    ("ip_address", f"at {IPV4}:8080", IPV4),
    ("ip_address", f"it was...{IPV4}", IPV4),
    ("ip_address", f"host.{IPV4}", IPV4),
    ("ip_address", f"it was...{IPV6}", IPV6),
    ("ip_address", f"[{IPV6}]:80", IPV6),
    ("ip_address", f"from {IPV6}: refused", IPV6),
    ("ip_address", "::ffff:192.0.2.9 ", "::ffff:192.0.2.9"),
    ("ip_address", "::1", "::1"),
    ("ip_address", f"IP:{IPV6}", IPV6),
    ("ip_address", f"node:{IPV6}", IPV6),
    ("ip_address", f"urn:addr:{IPV6} x", IPV6),
    ("phone_number", f"call {PHONE}!", PHONE),
    ("phone_number", "call +1 (650) 253-0000 now", "+1 (650) 253-0000"),
]


@pytest.mark.parametrize(("kind", "text", "value"), FORMS)
def test_pattern_finds_a_value_in_a_sentence(kind: str, text: str, value: str) -> None:
    assert values_of(text, kind) == [value]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("card_number", "4111 1111 1111 1112"),
        ("card_number", "1111 1111 1111 1117"),
        ("card_number", "41111111111111111111"),
        ("card_number", "411111111111"),
        ("iban", "GB83 WEST 1234 5698 7654 32"),
        ("iban", "GB82 WEST 1234 5698 7654 3"),
        ("iban", "GB82WEST123456987654321"),
        ("iban", "XX82WEST12345698765432"),
        ("email", "ada@localhost"),
        ("email", "@example.org"),
        ("ip_address", "256.1.1.1"),
        ("ip_address", "1.2.3.4.5.6"),
        ("ip_address", "12:30:45"),
        ("ip_address", "00:1a:2b:3c:4d:5e"),
        ("ip_address", "std::vector a :: b"),
        ("ip_address", "std::abc::def"),
        ("ip_address", "time:12:30:45"),
        ("ip_address", "mac:00:1a:2b:3c:4d:5e"),
        ("phone_number", "020 8366 1177"),
        ("phone_number", "+1 555 1"),
    ],
)
def test_pattern_refuses_a_wrong_check_or_form(kind: str, text: str) -> None:
    assert values_of(text, kind) == []


def test_one_wrong_digit_of_a_card_or_an_iban_is_noticed() -> None:
    """Both checks notice every single wrong digit."""
    for kind, value in (("card_number", CARD), ("iban", IBAN)):
        for place in (place for place, character in enumerate(value) if character.isdigit() and place > 0):
            for digit in set("0123456789") - {value[place]}:
                assert values_of(value[:place] + digit + value[place + 1 :], kind) == []


def test_national_phone_number_needs_its_region() -> None:
    assert values_of("020 8366 1177", "phone_number", "GB") == ["020 8366 1177"]
    assert values_of("020 8366 1177", "phone_number", "US") == []


def test_country_of_an_iban_has_one_length() -> None:
    assert len(patterns._IBAN_LENGTHS) == 88
    assert all(re.fullmatch("[A-Z]{2}", country) for country in patterns._IBAN_LENGTHS)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("E-Mail", "email"), ("PHONE_NUMBER", "phone_number"), ("credit card", "card_number"), ("person", ""), ("?", "")],
)
def test_kind_has_several_names(name: str, kind: str) -> None:
    assert pattern_of(name) == kind


def test_key_of_a_pattern_is_a_name_of_its_kind() -> None:
    assert [pattern_of(kind) for kind in KINDS] == list(KINDS)


HOSTILE = {
    "digits": "1",
    "card digits": "4",
    "digits in groups of 4": "4111 ",
    "cards without end": "4111-",
    "plus": "+",
    "plus and digit": "+1",
    "phones that touch": "+4420",
    "brackets": "(",
    "bracketed digits": "(1)",
    "phones": "+44 20 8366 1177 ",
    "wrong phones": "+44 20 8366 11 ",
    "extensions": "1 ext. 1",
    "dots": ".",
    "octets": "1.",
    "colons": ":",
    "groups": "1:",
    "hex": "f",
    "names": "ip:",
    "at": "@",
    "local parts": "a@",
    "labels": "a@a.",
    "letters": "a",
    "words": "ab12 ",
    "ibans": "GB82 WEST 1234 5698 7654 3",
    "iban heads": "GB82",
    "joints": "- ",
    "arabic digits": "٤١١١",
    "full-width digits": "１２３",
    "marks": "\u0301",
    "astral": "𝟜",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", HOSTILE)
def test_time_of_a_pattern_is_proportional_to_the_text(kind: str, name: str) -> None:
    """Doubled lengths take about twice the time: a quadratic pattern takes four times, and an exponential one never
    ends. The better of two runs counts.
    """
    piece = HOSTILE[name]

    def best_s(size: int) -> float:
        text = (piece * (size // len(piece) + 1))[:size]
        times_s = []
        for _ in range(2):
            began_s = time.thread_time()
            for _ in ranges_of(text, [kind], "US"):
                pass
            times_s.append(time.thread_time() - began_s)
        return min(times_s)

    assert best_s(MEGABYTE // 32) < 8 * best_s(MEGABYTE // 128) + 0.02


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("piece", ["4111 ", "a@a."])
def test_hostile_megabyte_takes_seconds(kind: str, piece: str) -> None:
    """Phone numbers, of which each candidate is looked up in tables, get the largest text that the route takes."""
    size = redact.MAX_TEXT if kind == "phone_number" else MEGABYTE
    began_s = time.thread_time()
    for _ in ranges_of((piece * size)[:size], [kind], "US"):
        pass
    assert time.thread_time() - began_s < 30


# overlaps


def span(start: int, end: int, kind: str = "a", score: float | None = 0.5, source: Any = "model") -> SensitiveSpan:
    return SensitiveSpan(start, end, kind, score, source)


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([span(0, 3), span(3, 5)], [(0, 3, "a"), (3, 5, "a")]),
        ([span(0, 9, "b"), span(2, 4, "a")], [(0, 9, "b")]),
        ([span(0, 4, "a"), span(3, 9, "b")], [(0, 9, "b")]),
        ([span(0, 4, "a", 0.9), span(2, 6, "b", 0.4)], [(0, 6, "a")]),
        ([span(0, 4, "a", 0.9), span(2, 6, "b", None, "pattern")], [(0, 6, "b")]),
        ([span(0, 4, "b"), span(0, 4, "a")], [(0, 4, "a")]),
        ([span(0, 4, "a", 0.9), span(0, 4, "a", None, "pattern"), span(0, 4, "a", 0.4)], [(0, 4, "a")]),
        ([span(0, 4, "a"), span(3, 7, "b"), span(6, 12, "c")], [(0, 12, "c")]),
        ([span(5, 9, "b"), span(0, 2, "a")], [(0, 2, "a"), (5, 9, "b")]),
    ],
)
def test_overlapping_spans_become_one_of_the_longest_kind(
    spans: list[SensitiveSpan], expected: list[tuple[int, int, str]]
) -> None:
    for ordered in itertools.permutations(spans):
        assert [(merged_span.start, merged_span.end, merged_span.kind) for merged_span in disjoint(ordered)] == expected


# styles


def test_equal_values_have_equal_replacements_and_different_ones_differ() -> None:
    for style in ("hash", "tag", "synthetic"):
        replacer = Replacer(style, b"k" * 32)
        kinds = [*KINDS, "person", "date of birth", "IBAN number", "organisation"]
        written = {(kind, value): replacer.replacement(kind, str(value)) for kind in kinds for value in range(1000)}
        assert all(replacer.replacement(kind, str(value)) == text for (kind, value), text in written.items())
        assert len(set(written.values())) == len(written) - (1000 if style == "synthetic" else 0)


def test_synthetic_replacements_of_kinds_with_the_same_stand_ins_differ() -> None:
    replacer = Replacer("synthetic")
    kinds = ("person", "name", "full name", "PER")
    assert len({replacer.replacement(kind, f"person of the kind {kind}") for kind in kinds}) == len(kinds)


def test_hash_depends_on_the_key_and_is_not_that_of_the_value_alone() -> None:
    replacement, same, different = (Replacer("hash", key).replacement("phone", PHONE) for key in (b"a", b"a", b"b"))
    assert replacement == same != different
    assert re.fullmatch(r"\[PHONE_[0-9a-f]{16}\]", replacement)


def test_mask_shows_neither_length_nor_kind() -> None:
    assert {Replacer("mask").replacement(kind, value) for kind, value in VALUES.items()} == {MASK}


def test_stand_in_has_the_form_of_its_kind_and_is_no_real_value() -> None:
    replacer = Replacer("synthetic")
    for number in range(2000):
        texts = {kind: replacer.replacement(kind, f"{value}{number}") for kind, value in VALUES.items()}
        assert re.fullmatch(r"9999( \d{4}){3}", texts["card_number"])
        assert patterns.is_luhn(map(int, texts["card_number"].replace(" ", "")))
        assert texts["iban"].startswith("XX")
        assert patterns.iban_remainder(texts["iban"]) == 1
        assert texts["email"].endswith("@example.com")
        assert values_of(texts["ip_address"], "ip_address") == [texts["ip_address"]]
        assert texts["phone_number"].startswith("+44 7700 900")
    assert replacer.replacement("IPv6", IPV6).startswith("2001:db8::")
    assert replacer.replacement("person", "Ada") == "Alex Example"
    assert replacer.replacement("job title", "Countess") == "Example job title 1"


def test_tag_has_no_characters_of_a_kind_that_end_it() -> None:
    assert Replacer("tag").replacement("a] [b\n", "x") == "[A_B_1]"


# texts

EXPECTED = {
    "mask": "***** met *****.",
    "tag": "[PERSON_1] met [PERSON_1].",
    "synthetic": "Alex Example met Alex Example.",
}


@pytest.mark.parametrize("style", EXPECTED)
def test_redacted_text_has_the_replacements_of_its_style(style: str) -> None:
    entities = [{"label": "person", "score": 0.9, "start": start, "end": start + 3} for start in (0, 8)]
    slot = redacted_slot("Ada met Ada.", entities, rules(style, "person"))
    assert slot["text"] == EXPECTED[style]
    assert [(slot_span["start"], slot_span["end"], slot_span["source"]) for slot_span in slot["spans"]] == [
        (0, 3, "model"),
        (8, 11, "model"),
    ]


def test_pattern_carries_the_name_of_its_kind_in_the_request() -> None:
    slot = redacted_slot(f"to {IBAN}", [], rules("tag", "person", "IBAN number"))
    assert slot["text"] == "to [IBAN_NUMBER_1]"
    assert slot["spans"] == [
        {"start": 3, "end": 3 + len(IBAN), "kind": "IBAN number", "score": None, "source": "pattern"}
    ]


def test_pattern_that_no_kind_names_does_not_run() -> None:
    assert redacted_slot(IBAN, [], rules("tag", "person"))["text"] == IBAN


def test_combining_marks_go_with_the_character_before_them() -> None:
    entities = [{"label": "person", "score": 0.9, "start": 0, "end": 4}]
    assert redacted_slot("Jose\u0301 met", entities, rules("mask", "person"))["text"] == "***** met"


@pytest.mark.parametrize("place", [(None, None), (0, None), (-1, 2), (0, 9), (3, 2), (0.0, 2)])
def test_entity_without_a_place_in_the_text_fails_the_text(place: tuple[Any, Any]) -> None:
    entity = {"label": "person", "score": 0.9, "start": place[0], "end": place[1]}
    with pytest.raises(InferenceFailed):
        redacted_slot("Ada met", [entity], rules("mask", "person"))


def test_random_texts_keep_what_is_outside_of_spans_and_are_restored_byte_for_byte() -> None:
    """10,000 texts, in every style and both kinds of offsets."""
    chance = random.Random(47)
    replaced = 0
    for number in range(10_000):
        text = random_text(chance)
        entities = random_entities(chance, text)
        style, offsets = STYLES[number % 4], get_args(Offsets)[number // 4 % 2]
        slot = redacted_slot(text, entities, rules(style, offsets=offsets))
        assert restore(slot["text"], slot["map"]).encode() == text.encode()
        units = [1 + (ord(character) > 0xFFFF and offsets == "utf16") for character in text]
        places = [0, *itertools.accumulate(units)]
        spans = [(places.index(slot_span["start"]), places.index(slot_span["end"])) for slot_span in slot["spans"]]
        for value, kind in ((entity, "model") for entity in entities):
            covered = any(start <= value["start"] and value["end"] <= end for start, end in spans)
            assert covered or value["start"] == value["end"], kind
        new_units = [1 + (ord(character) > 0xFFFF and offsets == "utf16") for character in slot["text"]]
        new_places = [0, *itertools.accumulate(new_units)]
        parts = [(new_places.index(part["start"]), new_places.index(part["end"])) for part in slot["map"]["parts"]]
        assert slot["map"]["length"] == new_places[-1]
        outside = _outside(text, spans)
        assert outside == _outside(slot["text"], parts)
        assert [len(piece) for piece in outside] == [len(piece) for piece in _outside(slot["text"], parts)]
        assert [part["text"] for part in slot["map"]["parts"]] == [text[start:end] for start, end in spans]
        replaced += len(spans)
    assert replaced > 10_000


def _outside(text: str, spans: list[tuple[int, int]]) -> list[str]:
    edges = [0, *itertools.chain(*spans), len(text)]
    return [text[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True)]


def test_utf16_offsets_are_those_of_the_encoded_text() -> None:
    text = "a👩\u200d👧é𝔄"
    places = list(range(len(text) + 1))
    assert utf16_offsets(text, places) == [len(text[:place].encode("utf-16-le")) // 2 for place in places]


# restoration


def test_restore_refuses_another_text() -> None:
    slot = redacted_slot(f"mail {EMAIL} or {EMAIL}", [], rules("tag"))
    assert slot["text"] == "mail [EMAIL_1] or [EMAIL_1]"
    for wrong in (f"{slot['text']} ", slot["text"][1:], slot["text"].replace("_1", "_2"), ""):
        with pytest.raises(InvalidInputError, match="another text"):
            restore(wrong, slot["map"])


def test_restore_refuses_parts_that_are_out_of_order() -> None:
    slot = redacted_slot(f"{EMAIL} {EMAIL}", [], rules("tag"))
    slot["map"]["parts"].reverse()
    with pytest.raises(InvalidInputError):
        restore(slot["text"], slot["map"])


def test_error_of_restore_repeats_no_value() -> None:
    slot = redacted_slot(EMAIL, [], rules("tag"))
    with pytest.raises(InvalidInputError) as caught:
        restore("x", slot["map"])
    assert EMAIL not in str(caught.value)
