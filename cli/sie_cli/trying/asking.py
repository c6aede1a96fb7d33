"""Request of `sie try`: read the inputs (texts and files), send them to the model, and return the answer."""

from __future__ import annotations

import mimetypes
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from sie_cli.display import printable
from sie_cli.gateway_client import ModelDescription
from sie_cli.refusal import CommandRefused
from sie_client import SIEClient
from sie_client.core import quoted
from sie_client.types import ExtractParams, Item
from sie_contracts.errors import UNDECODABLE
from sie_contracts.loopback import client_options

STDIN, FILE = "-", "@"


@dataclass(frozen=True)
class QuestionInput:
    """Input of a question to a model: a text or a file. `text`: empty for a file. `file`: path; empty for a text."""

    item: Item
    text: str = ""
    file: str = ""

    @property
    def label(self) -> str:
        return printable(" ".join(self.text.split()) if self.text else f"{FILE}{self.file}")


def read(arguments: Sequence[str], query: str | None) -> tuple[tuple[QuestionInput, ...], QuestionInput | None]:
    """Read the inputs, and the query if there is one. Raises CommandRefused."""
    if not arguments:
        raise CommandRefused(
            'nothing to try: give a text, as in `sie try MODEL "a text"`; - reads one from standard input, @FILE names '
            "a file"
        )
    if [*arguments, query].count(STDIN) > 1:
        raise CommandRefused(f"{STDIN} reads standard input, which can be read only once: give it once")
    inputs = tuple(_input(argument, f"text {number}") for number, argument in enumerate(arguments, 1))
    return inputs, None if query is None else _input(query, "--query")


def _input(argument: str, name: str) -> QuestionInput:
    if argument == STDIN:
        return _text(_standard_input(), "standard input")
    if argument.startswith(FILE * 2):
        return _text(argument[1:], name)
    if argument.startswith(FILE):
        return _file(argument[1:])
    return _text(argument, name)


def _text(text: str, name: str) -> QuestionInput:
    if not text.strip():
        raise CommandRefused(f"{name} is empty: give a text for the model")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CommandRefused(f"{name} is no valid UTF-8: give a text in UTF-8") from error
    return QuestionInput({"text": text}, text)


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise CommandRefused(f"standard input is no text in UTF-8 ({error}): give a file as @FILE") from error


def _file(name: str) -> QuestionInput:
    """Build an input from a file: an image, a sound or a document, by its suffix. The client reads the file later."""
    path = Path(name)
    if not path.is_file():
        raise CommandRefused(
            f"there is no file {printable(name) or '(no name)'}. To send a text that begins with {FILE}, "
            f"write {FILE * 2}"
        )
    kind = (mimetypes.guess_type(path.name)[0] or "").partition("/")[0]
    item: Item = {"images": [path]} if kind == "image" else {"audio": path} if kind == "audio" else {"document": path}
    return QuestionInput(item, file=name)


STRONGEST = 10  # number of weights of a sparse vector that are shown, largest first
DECODE_S = 10.0
# fields of a reply that describe the whole request; all other fields except `headers` describe one input
_OF_REQUEST = ("model", "fingerprint", "request_id", "muvera", "warnings", "explain", "timing")


@dataclass(frozen=True)
class Question:
    """Question to a model. `query`: for the task "score". `threshold` and `labels`: for the task "extract"."""

    model: str
    inputs: tuple[QuestionInput, ...]
    query: QuestionInput | None = None
    labels: tuple[str, ...] = ()
    threshold: float | None = None
    explain: bool = False


@dataclass(frozen=True)
class ModelAnswer:
    """Answer of a model. `results`: one per input; for the task "score", best first. `shared`: fields about the whole
    request. `info`: the model's description. `words`: token id -> text, for the shown weights of sparse vectors.
    """

    verb: str
    info: ModelDescription
    question: Question
    results: Sequence[Mapping[str, Any]]
    shared: Mapping[str, Any]
    words: Mapping[int, str] = field(default_factory=dict)

    @property
    def failed(self) -> int:
        return sum("error" in result for result in self.results)

    def place(self, entry: Mapping[str, Any]) -> int:
        """Return the index in `question.inputs` of the input that the score `entry` rates."""
        return int(str(entry["item_id"]).removeprefix("item-"))


def verb_of(info: ModelDescription, question: Question) -> str:
    """Return the task: "encode", "score" or "extract". A query requires "score"; labels or a threshold require
    "extract". Without these options, return the model's first task. If that is "score" and the model also does
    "encode", return "encode". Raises CommandRefused if the options contradict each other or do not fit the model, or if
    a query is missing.
    """
    tasks, name = info.tasks, info.name
    does = f"{name} does {' and '.join(tasks)}"
    if question.query is not None and question.labels:
        raise CommandRefused("--query ranks texts and --labels finds parts of them: use only one of the two")
    if question.query is not None:
        if "score" not in tasks:
            more = "; without --query the vectors of the texts are compared" if "encode" in tasks else ""
            raise CommandRefused(f"--query needs a model that scores; {does}{more}")
        return "score"
    if question.labels or question.threshold is not None:
        if "extract" not in tasks:
            option = "--labels" if question.labels else "--threshold"
            raise CommandRefused(f"{option} needs a model that extracts; {does}")
        return "extract"
    if tasks[0] == "score":
        if "encode" in tasks:
            return "encode"
        raise CommandRefused(f'{name} scores texts against a query: give the query with --query "a question"')
    return tasks[0]


def ask_model(
    client: SIEClient, info: ModelDescription, question: Question, url: str, token: str | None
) -> ModelAnswer:
    """Send the inputs of a question to its model, and return the answer. `info`: the model's description.
    Raises CommandRefused and SIEError.
    """
    verb = verb_of(info, question)
    items = [result.item for result in question.inputs]
    if verb == "score":
        assert question.query is not None
        scored = dict(client.score(question.model, question.query.item, items, explain=question.explain))
        scored.pop("headers", None)
        entries: list[Mapping[str, Any]] = scored.pop("scores")  # type: ignore[assignment]
        return ModelAnswer(verb, info, question, entries, scored)
    if verb == "extract":
        params: ExtractParams = {"explain": question.explain}
        if question.labels:
            params["labels"] = question.labels
        if question.threshold is not None:
            params["threshold"] = question.threshold
        replies: Any = client.extract(question.model, items, **params)
    else:
        replies = client.encode(question.model, items, output_types=list(info.dims), explain=question.explain)
    results = [
        {name: value for name, value in result.items() if name not in (*_OF_REQUEST, "headers")} for result in replies
    ]
    # The client may have split the inputs into several requests. The slowest request gives the shown timing. A request
    # whose inputs all failed has no timing.
    slowest = max(replies, key=lambda reply: reply["timing"].get("total_ms", -1.0))
    shared = {name: slowest[name] for name in _OF_REQUEST if name in slowest} | {"usage": replies.usage}
    ids = {int(number) for result in results if "sparse" in result for number in strongest(result["sparse"])[0]}
    return ModelAnswer(verb, info, question, results, shared, words_of(ids, question.model, url, token))


def strongest(sparse: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    """Return (ids, weights) of the largest weights of a sparse vector, at most STRONGEST, the largest first."""
    values = np.asarray(sparse["values"], np.float64)
    places = np.argsort(-values, kind="stable")[:STRONGEST]
    return np.asarray(sparse["indices"])[places].tolist(), values[places].tolist()


def words_of(ids: Iterable[int], model: str, url: str, token: str | None) -> dict[int, str]:
    """Return the text of each token id, by the model's tokenizer; empty if the gateway does not return the texts."""
    requested_ids = sorted(ids)
    if not requested_ids:
        return {}
    headers = {"authorization": f"Bearer {token}"} if token else {}
    body = {"ids": [[token] for token in requested_ids], "skip_special_tokens": False}
    try:
        with httpx.Client(**client_options(url, httpx.HTTPTransport), timeout=DECODE_S) as client:
            answer = client.post(f"{url}/tei/{quoted(model, 'model')}/decode", json=body, headers=headers)
        words = answer.json() if answer.status_code == 200 else None
    except (httpx.HTTPError, *UNDECODABLE):
        return {}
    if (
        not isinstance(words, list)
        or len(words) != len(requested_ids)
        or not all(isinstance(token, str) for token in words)
    ):
        return {}
    return dict(zip(requested_ids, words, strict=True))


def reply(answer: ModelAnswer) -> dict[str, Any]:
    """Return the answer in the JSON form of the API, with the id of the request."""
    if answer.verb == "score":
        return {**answer.shared, "scores": list(answer.results)}
    return {**answer.shared, "items": [_slot(result) for result in answer.results]}


def _slot(result: Mapping[str, Any]) -> dict[str, Any]:
    slot = {name: value for name, value in result.items() if name != "outputs"}
    for name, described in result.get("outputs", {}).items():
        slot[name] = {**described, **(result[name] if name == "sparse" else {"values": result[name]})}
    return slot
