"""Tasks to find facts in texts. Most texts are templates, filled with random values from a fixed seed.

redaction, entities ──► templates of the package presidio-evaluator, values of Faker
redaction-forms     ──► values of Faker and phonenumbers, in usual and in disguising formats
relations           ──► sentences of this module, names of Faker
entities-ja         ──► the package hironsancorpus: news in Japanese, annotated by people
topics              ──► docstrings of scipy; the class is the part of the library
"""

from __future__ import annotations

import importlib.metadata
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sie_evals.docstrings import scipy_docstrings
from sie_evals.labelled import Fact, FactTask, KindSpan, LabelledText
from sie_evals.packages import JAPANESE_PACKAGE, TEMPLATES_PACKAGE

if TYPE_CHECKING:
    from faker import Faker

LOCALES = ("en_US", "en_GB", "de_DE", "fr_FR", "es_ES", "it_IT", "pl_PL")
FILLINGS = 5  # number of texts made from each template
VALUES_PER_FORMAT = 40  # number of values of each format in the task "redaction-forms"
STORIES = 400  # number of texts in the task "relations"
LEAST_TOPIC_WORDS = 40  # smallest number of words of a text in the task "topics"; shorter docstrings are left out
Slot = tuple[str, Callable[["Faker"], object]]


def _slots() -> Mapping[str, Slot]:
    """Return the placeholders of templates by name, such as `city` for {{city}}. A placeholder is a pair: the kind of
    the fact (empty if the value is no fact), and a function that makes a value.
    """
    person = {
        "person": lambda faker: faker.name(),
        "name": lambda faker: faker.name(),
        "name_male": lambda faker: faker.name_male(),
        "name_female": lambda faker: faker.name_female(),
        "first_name": lambda faker: faker.first_name(),
        "first_name_male": lambda faker: faker.first_name_male(),
        "first_name_female": lambda faker: faker.first_name_female(),
        "first_name_nonbinary": lambda faker: faker.first_name(),
        "last_name": lambda faker: faker.last_name(),
        "last_name_male": lambda faker: faker.last_name(),
        "last_name_female": lambda faker: faker.last_name(),
    }
    address = {
        "address": lambda faker: faker.address().replace("\n", ", "),
        "street_name": lambda faker: faker.street_name(),
        "building_number": lambda faker: faker.building_number(),
        "secondary_address": lambda faker: f"Apt. {faker.random_int(1, 999)}",
        "postcode": lambda faker: faker.postcode(),
        "zipcode": lambda faker: faker.postcode(),
    }
    return {
        **{name: ("person", value) for name, value in person.items()},
        **{name: ("address", value) for name, value in address.items()},
        "city": ("city", lambda faker: faker.city()),
        "country": ("country", lambda faker: faker.country()),
        "organization": ("organization", lambda faker: faker.company()),
        "phone_number": ("phone number", lambda faker: faker.phone_number()),
        "email": ("email", lambda faker: faker.email()),
        "url": ("url", lambda faker: faker.url()),
        "credit_card_number": ("card number", lambda faker: faker.credit_card_number()),
        "iban": ("iban", lambda faker: faker.iban()),
        "ip_address": ("ip address", lambda faker: faker.ipv6() if faker.boolean(25) else faker.ipv4()),
        "date_of_birth": ("date of birth", lambda faker: faker.date_of_birth().strftime("%d %B %Y")),
        "ssn": ("social security number", lambda faker: faker.numerify("###-##-####")),
        "us_driver_license": ("driver license", lambda faker: faker.bothify("?#######").upper()),
        "age": ("", lambda faker: faker.random_int(18, 90)),
        "date_time": ("", lambda faker: faker.date()),
        "year": ("", lambda faker: faker.year()),
        "day_of_week": ("", lambda faker: faker.random_element(("Monday", "Friday", "Sunday"))),
        "job": ("", lambda faker: faker.job()),
        "prefix": ("", lambda faker: "Dr."),
        "prefix_male": ("", lambda faker: "Mr."),
        "prefix_female": ("", lambda faker: "Ms."),
        "state_abbr": ("", lambda faker: faker.random_element(("CA", "TX", "NY", "WA", "OH"))),
        "nationality": ("", lambda faker: faker.random_element(("Dutch", "Kenyan", "Chilean", "Korean"))),
        "nation_woman": ("", lambda faker: faker.random_element(("Dutchwoman", "Kenyan", "Chilean"))),
        "nation_plural": ("", lambda faker: faker.random_element(("Kenyans", "Chileans", "Koreans"))),
    }


PERSONAL = (
    "person",
    "address",
    "city",
    "phone number",
    "email",
    "url",
    "card number",
    "iban",
    "ip address",
    "date of birth",
    "social security number",
    "driver license",
)
NAMED = ("person", "organization", "city", "country", "address")


def redaction() -> FactTask:
    """Return a task to redact personal data in letters, forms and questions to a bank."""
    return FactTask("redaction", "redaction", PERSONAL, _filled(PERSONAL))


def entities() -> FactTask:
    """Return a task to find persons, organizations and places in the texts of `redaction`."""
    return FactTask("entities", "entities", NAMED, _filled(NAMED))


def _filled(kinds: Sequence[str]) -> list[LabelledText]:
    """Fill each template FILLINGS times. Return the texts, each with those of its facts whose kind is in `kinds`."""
    (file,) = _files(TEMPLATES_PACKAGE, "templates.txt")
    lines = file.read_text("utf-8", "replace").splitlines()
    templates = [line.replace("\\n", "\n") for line in lines if line.strip()]
    values, slots = _Values(), _slots()
    texts = []
    for template in templates * FILLINGS:
        faker = values.faker()
        text, spans = "", list[KindSpan]()
        for position, piece in enumerate(re.split(r"\{\{(\w+)\}\}", template)):
            if position % 2 == 0:
                text += piece
                continue
            kind, value = slots[piece]
            start, text = len(text), text + str(value(faker))
            if not kind:
                continue
            if spans and spans[-1].kind == kind and not text[spans[-1].end : start].strip():
                start = spans.pop().start  # adjacent values of one kind, such as first and last name, are one fact
            spans.append(KindSpan(start, len(text), kind))
        texts.append(LabelledText(text, [span for span in spans if span.kind in kinds]))
    return texts


class _Values:
    """Source of random values that are the same in each run. `faker` selects a random locale and returns its generator
    of values.
    """

    def __init__(self) -> None:
        from faker import Faker

        self.chance = random.Random(0)  # noqa: S311  texts, no secrets
        self._fakers = [Faker(locale) for locale in LOCALES]
        for seed, faker in enumerate(self._fakers):
            faker.seed_instance(seed)

    def faker(self) -> Faker:
        return self.chance.choice(self._fakers)


_LETTERS = str.maketrans("013568", "OlESbB")
_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_ZERO_WIDTH = "\u200b"
_EDGE = "\0"  # marks the beginning and the end of a value, if a format adds text around the value


def _groups(value: str, joint: str, size: int = 4) -> str:
    return joint.join(value[start : start + size] for start in range(0, len(value), size))


def _digits(value: str, zero: str) -> str:
    """Return the value with the digits of another script. `zero`: that script's zero."""
    return "".join(chr(ord(zero) + int(character)) if character in "0123456789" else character for character in value)


def _in_words(value: str) -> str:
    return " ".join(_WORDS[int(character)] if character.isdecimal() else character for character in value)


def _at(value: str, at: str, dot: str) -> str:
    local, _, domain = value.partition("@")
    return f"{local}{at}{domain.replace('.', dot)}"


def _octets(value: str) -> bytes:
    return bytes(map(int, value.split(".")))


Format = Callable[[str], str]
# kind of value -> name of a format -> function that writes a value in this format
FORMATS: Mapping[str, Mapping[str, Format]] = {
    "card number": {
        "in one piece": lambda value: value,
        "groups with spaces": lambda value: _groups(value, " "),
        "groups with hyphens": lambda value: _groups(value, "-"),
        "groups with dots": lambda value: _groups(value, "."),
        "groups with thin spaces": lambda value: _groups(value, "\u2009"),
        "full-width digits": lambda value: _digits(value, "\uff10"),
        "Arabic digits": lambda value: _digits(_groups(value, " "), "\u0660"),
        "groups with slashes": lambda value: _groups(value, "/"),
        "groups with two spaces": lambda value: _groups(value, "  "),
        "groups on four lines": lambda value: _groups(value, "\n"),
        "a space behind each digit": lambda value: _groups(value, " ", 1),
        "zero-width spaces": lambda value: _groups(value, _ZERO_WIDTH),
        "HTML spaces": lambda value: _groups(value, "&nbsp;"),
        "letters for digits": lambda value: value.translate(_LETTERS),
        "digits in words": _in_words,
    },
    "iban": {
        "in one piece": lambda value: value,
        "groups with spaces": lambda value: _groups(value, " "),
        "groups with hyphens": lambda value: _groups(value, "-"),
        "groups with no-break spaces": lambda value: _groups(value, "\u00a0"),
        "lower case": str.lower,
        "groups with dots": lambda value: _groups(value, "."),
        "groups with slashes": lambda value: _groups(value, "/"),
        "groups on lines": lambda value: _groups(value, "\n"),
        "a word before it, without a space": lambda value: f"IBAN{_EDGE}{value}{_EDGE}",
        "full-width digits": lambda value: _digits(value, "\uff10"),
        "zero-width spaces": lambda value: _groups(value, _ZERO_WIDTH),
    },
    "email": {
        "plain": lambda value: value,
        "with a tag": lambda value: value.replace("@", "+news@"),
        "upper case": str.upper,
        "in angle brackets": lambda value: f"<{value}>",
        "as a link": lambda value: f"mailto:{_EDGE}{value}{_EDGE}",
        "at and dot in words": lambda value: _at(value, " at ", " dot "),
        "at and dot in brackets": lambda value: _at(value, "[at]", "[dot]"),
        "spaces around the at": lambda value: value.replace("@", " @ "),
        "full-width at": lambda value: value.replace("@", "\uff20"),
        "at of HTML": lambda value: value.replace("@", "&#64;"),
        "at of a URL": lambda value: value.replace("@", "%40"),
        "quoted local part": lambda value: '"{}"@{}'.format(*value.split("@")),
        "zero-width space behind the at": lambda value: value.replace("@", f"@{_ZERO_WIDTH}"),
        "no dot in the host": lambda value: f"{value.partition('@')[0]}@localhost",
    },
    "ip address": {
        "IPv4": lambda value: value,
        "IPv4 with a port": lambda value: f"{_EDGE}{value}{_EDGE}:8080",
        "IPv4 in a URL": lambda value: f"http://{_EDGE}{value}{_EDGE}/index",
        "IPv4 in IPv6": lambda value: f"::ffff:{value}",
        "IPv6": lambda value: f"2001:db8::{_octets(value).hex(':', 2)}",
        "IPv6 in brackets": lambda value: f"[{_EDGE}2001:db8::{_octets(value).hex(':', 2)}{_EDGE}]:443",
        "full-width digits": lambda value: _digits(value, "\uff10"),
        "dots in brackets": lambda value: value.replace(".", "[.]"),
        "leading zeros": lambda value: ".".join(f"0{octet}" for octet in _octets(value)),
        "one number": lambda value: str(int.from_bytes(_octets(value))),
        "hexadecimal": lambda value: f"0x{_octets(value).hex()}",
        "spaces around the dots": lambda value: value.replace(".", " . "),
    },
    "phone number": {
        "+ in one piece": lambda value: value,
        "+ as its country writes it": lambda value: _phone(value, "INTERNATIONAL"),
        "+ with dots": lambda value: _phone(value, "INTERNATIONAL").replace(" ", ".").replace("-", "."),
        "link tel:": lambda value: f"tel:{_EDGE}{_phone(value, 'RFC3966').removeprefix('tel:')}{_EDGE}",
        "with an extension": lambda value: f"{_phone(value, 'INTERNATIONAL')} ext. 12",
        "full-width": lambda value: _digits(value.replace("+", "\uff0b"), "\uff10"),
        "00 for +": lambda value: value.replace("+", "00"),
        "without the country": lambda value: _phone(value, "NATIONAL"),
        "a space behind each digit": lambda value: _groups(value, " ", 1),
        "groups on lines": lambda value: _phone(value, "INTERNATIONAL").replace(" ", "\n"),
        "letters for digits": lambda value: value.translate(_LETTERS),
        "digits in words": _in_words,
        "zero-width spaces": lambda value: _groups(value, _ZERO_WIDTH, 3),
    },
}
_FRAMES = (
    "{}",
    "Please note {} for the file.",
    "It is {}, as I said.",
    "Use ({}) from now on; thank you.",
    "my data: {}",
)


def _phone(value: str, form: str) -> str:
    import phonenumbers

    return str(phonenumbers.format_number(phonenumbers.parse(value), getattr(phonenumbers.PhoneNumberFormat, form)))


def redaction_forms() -> FactTask:
    """Return a task to redact values that have a pattern, such as card numbers: VALUES_PER_FORMAT values in each format
    of FORMATS. The kind of a fact joins the kind of its value and the name of the format, such as `iban, lower case`.
    """
    values = _Values()
    texts = []
    for kind, formats in FORMATS.items():
        valid = list(_valid(kind, values))
        for name, write in formats.items():
            for value in valid:
                written = write(value)
                framed = values.chance.choice(_FRAMES).format(
                    written if _EDGE in written else f"{_EDGE}{written}{_EDGE}"
                )
                before, inner, after = framed.split(_EDGE)
                fact = (len(before), len(before) + len(inner), f"{kind}, {name}")
                texts.append(LabelledText(f"{before}{inner}{after}", [fact]))
    return FactTask("redaction-forms", "redaction", list(FORMATS), texts)


def _valid(kind: str, values: _Values) -> Iterator[str]:
    import phonenumbers

    if kind == "phone number":
        regions = values.chance.sample(sorted(phonenumbers.SUPPORTED_REGIONS), VALUES_PER_FORMAT)
        for region in regions:
            number = phonenumbers.example_number(region)
            assert number is not None, "each region has an example"
            yield phonenumbers.format_number(number, phonenumbers.PhoneNumberFormat.E164)
        return
    write: Callable[[Faker], str] = {
        "card number": lambda faker: faker.credit_card_number("visa16"),
        "iban": lambda faker: faker.iban(),
        "email": lambda faker: faker.email(),
        "ip address": lambda faker: faker.ipv4(),
    }[kind]
    for _ in range(VALUES_PER_FORMAT):
        yield str(write(values.faker()))


_SLOT = re.compile(r"\{(\w+)\}")
# relation -> sentences that state it. The first sentence names the head of the relation before the tail, because
# `relations` takes the first name as the head and the second as the tail
_STATEMENTS: Mapping[str, Sequence[str]] = {
    "works for": ("{person} works for {company}.", "{company} has employed {person} for years."),
    "born in": ("{person} was born in {city}.", "{city} is the birthplace of {person}."),
    "founded": ("{person} founded {company}.", "{company} was founded by {person}."),
    "headquartered in": ("{company} has its head office in {city}.", "{city} is home to the offices of {company}."),
    "owns": ("{company} owns {firm}.", "{firm} belongs to {company}."),
}
_LABEL_OF_SLOT = {"person": "person", "company": "organization", "firm": "organization", "city": "city"}


def relations() -> FactTask:
    """Return a task to find how people, companies and cities are related. A text has two statements about different
    names, so most pairs of its names have no relation. `mentions` of a text has all its names.
    """
    values = _Values()
    texts = []
    for _ in range(STORIES):
        text, mentions, facts = "", list[KindSpan](), list[Fact]()
        for relation in values.chance.sample(list(_STATEMENTS), 2):
            faker = values.faker()
            names = {"person": faker.name(), "company": faker.company(), "firm": faker.company(), "city": faker.city()}
            for position, piece in enumerate(_SLOT.split(values.chance.choice(_STATEMENTS[relation]))):
                if position % 2:
                    mentions.append(KindSpan(len(text), len(text) + len(names[piece]), _LABEL_OF_SLOT[piece]))
                text += names[piece] if position % 2 else piece
            text += " "
            head, tail = _SLOT.findall(_STATEMENTS[relation][0])
            facts.append((names[head], relation, names[tail]))
        texts.append(LabelledText(text.rstrip(), facts, mentions))
    return FactTask("relations", "relations", list(_STATEMENTS), texts)


_TAGS = {
    "PSN": "person",
    "ORG": "organization",
    "LOC": "location",
    "DAT": "date",
    "TIM": "time",
    "ART": "product or work",
    "MON": "amount of money",
    "PER": "percentage",
}


def entities_ja() -> FactTask:
    """Return a task to find names, dates and amounts in Japanese news. A line of the corpus has a word and its tag: B-
    for the first word of an entity, I- for its further words.
    """
    (file,) = _files(JAPANESE_PACKAGE, "iob_sents.txt")
    texts = []
    for sentence in file.read_text("utf-8").split("\n\n"):
        text, spans = "", list[KindSpan]()
        for line in filter(None, sentence.split("\n")):
            word, *_, tag = line.split("\t")
            mark, _, name = tag.partition("-")
            start, text = len(text), text + word
            if mark == "I" and spans and spans[-1].end == start:
                start, _, name = spans.pop().start, "", name
            if mark in "BI":
                spans.append(KindSpan(start, len(text), _TAGS[name]))
        if text:
            texts.append(LabelledText(text, spans))
    return FactTask("entities-ja", "entities", list(_TAGS.values()), texts)


TOPICS = {
    "cluster": "clustering",
    "fft": "Fourier transforms",
    "integrate": "integration and differential equations",
    "interpolate": "interpolation",
    "io": "reading and writing of files",
    "linalg": "linear algebra",
    "ndimage": "image processing",
    "optimize": "optimization and root finding",
    "signal": "signal processing",
    "sparse": "sparse matrices",
    "spatial": "geometry and distances",
    "special": "special functions",
    "stats": "statistics",
}


def topics() -> FactTask:
    """Return a task to classify docstrings of scipy by the part of the library to which they belong."""
    texts = [
        LabelledText(docstring, [(TOPICS[name.partition("/")[0]],)])
        for name, docstring in scipy_docstrings()
        if name.partition("/")[0] in TOPICS and len(docstring.split()) >= LEAST_TOPIC_WORDS
    ]
    return FactTask("topics", "classes", list(TOPICS.values()), texts)


def _files(distribution: str, name: str) -> Iterable[Path]:
    files = importlib.metadata.files(distribution) or ()
    return [Path(str(file.locate())) for file in files if file.name == name]


SHIPPED: Mapping[str, Callable[[], FactTask]] = {
    "redaction": redaction,
    "redaction-forms": redaction_forms,
    "entities": entities,
    "entities-ja": entities_ja,
    "relations": relations,
    "topics": topics,
}
