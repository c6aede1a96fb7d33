"""Redaction without a model: patterns and their checks, the rule for overlaps, styles, offsets, restoration."""

from __future__ import annotations

import itertools
import random
import re
import time
from collections.abc import Iterable, Iterator
from typing import Any, get_args

import phonenumbers
import pytest
from redaction_texts import CARD, EMAIL, IBAN, IPV4, IPV6, PHONE, VALUES, random_entities, random_text, redacted_slot

from sie_client import InvalidInputError, restore
from sie_contracts.api.inference import Offsets, RedactionStyle
from sie_contracts.errors import InferenceFailed
from sie_redact import patterns
from sie_redact.normalise import copies_of
from sie_redact.patterns import KINDS, pattern_of, ranges_of
from sie_redact.redact import RedactionRules
from sie_redact.replacements import MASK, Replacer
from sie_redact.spans import SensitiveSpan, disjoint

STYLES = get_args(RedactionStyle)
HOSTILE_SIZE = 1 << 14


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


# Forms in which people see the same value. In each, the whole form is the value.
WRITTEN: dict[str, list[str]] = {
    "card_number": [
        "4111\u00ad1111\u00ad1111\u00ad1111",
        "4111\u200b1111\u200b1111\u200b1111",
        "4111\u200d1111\u200d1111\u200d1111",
        "4111\ufe0f1111\ufe0f1111\ufe0f1111",
        "4111 \u202a1111 1111\u202c 1111",
        "4\u200b1\u200b1\u200b1\u200b1\u200b1\u200b1\u200b1\u200b1\u200b1\u200b1\u200b1\u200b1\u200b1\u200b1\u200b1",
        "4111\u20141111\u20141111\u20141111",
        "4111_1111_1111_1111",
        "4111   1111   1111   1111",
        "4111 - 1111 - 1111 - 1111",
        "41111111 11111111",
        "4111\u00a01111\u20091111\u30001111",
        "\uff14\uff11\uff11\uff11 1111 1111 \uff11\uff11\uff11\uff11",
        "\U0001d7d2\U0001d7cf\U0001d7cf\U0001d7cf 1111 1111 1111",
        "4111\uff0f1111\uff0f1111\uff0f1111",
        "4111&nbsp;1111&nbsp;1111&nbsp;1111",
        "4111&shy;1111&shy;1111&shy;1111",
        "4111%201111%201111%201111",
        "4111\x001111\x001111\x001111",
    ],
    "iban": [
        "GB82\u00adWEST\u00ad12345698765432",
        "GB82\u200bWEST\u200c12345698765432",
        "\uff27\uff22\uff18\uff12\uff37\uff25\uff33\uff3412345698765432",
        "GB82_WEST_1234_5698_7654_32",
        "GB82\u2014WEST\u20141234\u20145698\u20147654\u201432",
        "GB82&nbsp;WEST&nbsp;1234&nbsp;5698&nbsp;7654&nbsp;32",
        "GB82%20WEST%201234%205698%207654%2032",
    ],
    "email": [
        "ada\u00ad@example.org",
        "ada@\u200bexample\u2060.org",
        "ada@exam\u00adple.org",
        "ada@example\u3002org",
        "ada@example\uff0eorg",
        "ada\uff20example.org",
        "ada%40example.org",
        "ada&#64;example.org",
        "ada&commat;example.org",
        "ada&commat;example&period;org",
        "\uff41\uff44\uff41\uff20\uff45\uff58\uff41\uff4d\uff50\uff4c\uff45\uff0e\uff4f\uff52\uff47",
        '"ada lovelace"@example.org',
        '"ada\\"l"@example.org',
        "ada@\nexample.org",
        "ada@ \n  example.org",
        "ada@example.\norg",
        f"{'a' * 65}@example.org",
        f"{'ada.' * 100}b@example.org",
    ],
    "ip_address": [
        "192.168.001.010",
        "010.000.000.001",
        "\uff11\uff19\uff12.\uff11\uff16\uff18.\uff11.\uff11",
        "\uff11\uff19\uff12\uff0e\uff11\uff16\uff18\uff0e\uff11\uff0e\uff11",
        "192.\u200b168.\u200b1.\u200b1",
        "\u0662\u0660\u0663.0.113.7",
        "2001:\u200bdb8::\u200b1:7",
        "2001\uff1adb8\uff1a\uff1a1\uff1a7",
    ],
    "phone_number": [
        "+44\u00ad20\u00ad8366\u00ad1177",
        "+44\ufeff20\ufeff8366\ufeff1177",
        "+44\u201420\u20148366\u20141177",
        "+44_20_8366_1177",
        "\uff0b\uff14\uff14 20 8366 1177",
        "&plus;44&nbsp;20&nbsp;8366&nbsp;1177",
        "%2B44%2020%208366%201177",
        "+44 (0)20\u20118366\u20111177",
        "+\U0001d7d2\U0001d7d2 20 8366 1177",
    ],
}


@pytest.mark.parametrize(("kind", "form"), [(kind, form) for kind, forms in WRITTEN.items() for form in forms])
def test_pattern_finds_a_value_as_people_see_it(kind: str, form: str) -> None:
    """Each form is replaced whole and nothing beside it, and the text is restored byte for byte."""
    for before, after in (
        ("", ""),
        ("to ", " now"),
        ("\u00e9\u200b ", "\u3000\u4e2d"),
        ("x&amp; ", "; y"),
        ("<", ", 7"),
    ):
        text = f"{before}{form}{after}"
        assert values_of(text, kind) == [form]
        slot = redacted_slot(text, [], rules("tag", kind))
        assert slot["text"] == f"{before}[{kind.upper()}_1]{after}"
        assert restore(slot["text"], slot["map"]).encode() == text.encode()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("card_number", "1\u200b4111 1111 1111 1111"),
        ("card_number", "\u24604111 1111 1111 1111"),
        ("card_number", "4111 1111 1111 1111\u00b2"),
        ("iban", "to\u200bGB82WEST12345698765432"),
        ("ip_address", "1\u200b203.0.113.7"),
    ],
)
def test_mark_or_invisible_character_beside_a_value_does_not_hide_it(kind: str, text: str) -> None:
    assert len(values_of(text, kind)) == 1


@pytest.mark.parametrize(
    "text", ["ada@example.org\u3002\u8c22\u8c22", "ada@example.org.\nThen", "a @\nb.org ada@example.org"]
)
def test_email_address_ends_where_people_see_its_end(text: str) -> None:
    assert values_of(text, "email") == ["ada@example.org"]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("card_number", "4111    1111    1111    1111"),
        ("card_number", "4111\u00ad1111\u00ad1111\u00ad1112"),
        ("card_number", "4111\u200b1111\u200b1111\u200b11111"),
        ("card_number", "41111111 11111112"),
        ("card_number", "\u2463\u2460\u2460\u2460 1111 1111 1111"),
        ("card_number", "4111\u00b9 1111 1111 1111"),
        ("card_number", "4111&copy;1111&copy;1111&copy;1111"),
        ("card_number", "4111%301111%301111%301111"),
        ("iban", "GB82\u200bWEST\u200b1234569876543"),
        ("iban", "\uff27\uff22\uff18\uff13WEST12345698765432"),
        ("email", "ada&#65;example.org"),
        ("email", "ada%41example.org"),
        ("email", "ada\u3002example\u3002org"),
        ("email", "ada@example\u3002\u8c22\u8c22"),
        ("email", "a @\nexample.org"),
        ("email", "follow @\n\nexample.org"),
        ("email", "ada@example\norg"),
        ("email", '"@example.org'),
        ("email", '"ada\nb"@example.org'),
        ("ip_address", "001.002.003.256"),
        ("ip_address", "00001.2.3.4"),
        ("ip_address", "1\u30022\u30023"),
        ("ip_address", "1\u200b.2.3.4.5.6"),
        ("ip_address", "12\uff1a30\uff1a45"),
        ("phone_number", "+44_20_8366_11"),
        ("phone_number", "IMG_2023_0101_1234"),
        ("phone_number", "020\u20148366\u20141177"),
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


def test_national_phone_number_needs_its_region() -> None:
    assert values_of("020 8366 1177", "phone_number", "GB") == ["020 8366 1177"]
    assert values_of("020 8366 1177", "phone_number", "US") == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [("E-Mail", "email"), ("PHONE_NUMBER", "phone_number"), ("credit card", "card_number"), ("person", ""), ("?", "")],
)
def test_kind_has_several_names(name: str, kind: str) -> None:
    assert pattern_of(name) == kind


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


# pieces that hostile texts repeat, alone or mixed: separators, digits, beginnings of values, invisible characters
PIECES = (
    *HOSTILE.values(),
    *("1/", " - 1", "1\u20142", "1234.5678 ", "0800 1234 ", "2012-01-02 08 ", "6502530000 ", "+12345/", "12345678,"),
    *("2/", "2 - "),
    *(
        "1\u200b",
        "\u00ad",
        "\x00",
        "1\u3002",
        "&#64;",
        "a&#64;a.b ",
        "%40",
        "&",
        "1_",
        "_",
        '"',
        '\\"@a.b',
        "a@\n",
        "\n",
    ),
)
# Processor time per character of a hostile text, as a multiple of that of prose that is searched for all kinds
MOST_TIMES = 30


def hostile_texts() -> Iterator[str]:
    """Yield texts of each piece alone, and of 40 mixtures of one to five pieces."""
    chance = random.Random(11)
    mixtures = [(piece,) for piece in PIECES] + [chance.sample(PIECES, chance.randrange(1, 6)) for _ in range(40)]
    for pieces in mixtures:
        yield "".join(chance.choices(pieces, k=HOSTILE_SIZE))[:HOSTILE_SIZE]


def thread_s(text: str, kinds: Iterable[str], region: str) -> float:
    """Return the processor time of a search in seconds, the better of two."""
    times_s = []
    for _ in range(2):
        began_s = time.thread_time()
        for _ in ranges_of(text, kinds, region):
            pass
        times_s.append(time.thread_time() - began_s)
    return min(times_s)


@pytest.fixture(scope="module")
def prose_s() -> float:
    """Return the processor time in seconds for HOSTILE_SIZE characters of prose, with all patterns."""
    chance = random.Random(3)
    words = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.randrange(2, 9))) for _ in range(2000)]
    text = " ".join(chance.choices(words, k=HOSTILE_SIZE))[:HOSTILE_SIZE]
    thread_s("+1", ["phone_number"], "DE")  # loads the tables
    return thread_s(text, KINDS, "DE")


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"phone_number"}))
def test_hostile_text_costs_a_bounded_multiple_of_prose(kind: str, prose_s: float) -> None:
    for text in hostile_texts():
        assert thread_s(text, [kind], "DE") / len(text) < MOST_TIMES * prose_s / HOSTILE_SIZE, text[:40]


def test_phone_lookups_of_a_text_cost_at_most_what_its_length_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookups make the search for phone numbers slow. They are counted for the texts of the test above."""
    costs: list[int] = []
    real = phonenumbers.PhoneNumberMatcher._parse_and_verify

    def counted(self: Any, candidate: str, offset: int) -> Any:
        costs.append(patterns.LOOKUP_COST + len(candidate))
        return real(self, candidate, offset)

    monkeypatch.setattr(phonenumbers.PhoneNumberMatcher, "_parse_and_verify", counted)
    for text in hostile_texts():
        costs.clear()
        list(ranges_of(text, ["phone_number"], "DE"))
        assert sum(costs) < 7 * len(text) * len(copies_of(text)), text[:40]


def test_candidates_beyond_the_bound_count_as_phone_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers behind many candidates do not stay in the text. Other texts keep what is no number."""
    text = "12345678, 030 1234567"
    assert values_of(text, "phone_number", "DE") == ["030 1234567"]
    monkeypatch.setattr(patterns, "FREE_COST", 0)
    monkeypatch.setattr(patterns, "COST_PER_CHARACTER", 0)
    assert values_of("0301234, 030 1, 12", "phone_number", "DE") == ["0301234"]


@pytest.mark.parametrize("home", ["US", "DE"])
def test_phone_numbers_that_are_not_looked_up_are_no_phone_numbers(home: str) -> None:
    """The library alone finds the same: examples of all regions in all formats, with digits beside them."""
    chance = random.Random(5)
    count = 0
    for region in sorted(phonenumbers.SUPPORTED_REGIONS):
        example = phonenumbers.example_number_for_type(region, chance.randrange(5))
        if example is None:
            continue
        written = phonenumbers.format_number(example, chance.randrange(4))
        if chance.random() < 0.3:
            written = phonenumbers.format_out_of_country_calling_number(example, home)
        text = chance.choice(("", "12 ", "1/", "(")) + written + chance.choice(("", " ext. 12345", "/5", "#123", " 12"))
        matcher = phonenumbers.PhoneNumberMatcher(text, home, max_tries=len(text) + 1)
        expected = [text[match.start : match.end] for match in matcher]
        assert values_of(text, "phone_number", home) == expected
        count += len(expected)
    assert count > 100


@pytest.mark.parametrize("kind", KINDS)
def test_values_at_every_place_of_a_window_are_found(kind: str) -> None:
    value = VALUES[kind]
    for place in range(patterns.WINDOW - len(value) - 3, patterns.WINDOW + 4):
        text = f"{'ab ' * patterns.WINDOW}"[:place] + f" {value} " + "cd " * 400
        assert values_of(text, kind) == [value]


@pytest.mark.parametrize("kind", KINDS)
def test_search_ends_within_a_window_when_it_may_not_proceed(kind: str) -> None:
    calls = 0

    def proceed() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        list(ranges_of("+ab " * patterns.WINDOW, [kind], "", proceed))
    assert calls == 3


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


# restoration


def test_restore_refuses_another_text() -> None:
    slot = redacted_slot(f"mail {EMAIL} or {EMAIL}", [], rules("tag"))
    assert slot["text"] == "mail [EMAIL_1] or [EMAIL_1]"
    for wrong in (f"{slot['text']} ", slot["text"][1:], slot["text"].replace("_1", "_2"), ""):
        with pytest.raises(InvalidInputError, match="another text"):
            restore(wrong, slot["map"])


def test_error_of_restore_repeats_no_value() -> None:
    slot = redacted_slot(EMAIL, [], rules("tag"))
    with pytest.raises(InvalidInputError) as caught:
        restore("x", slot["map"])
    assert EMAIL not in str(caught.value)
