"""Sources that an evaluation compares: a cluster, a library or patterns in this process, or a server that is not SIE. A
source returns vectors or scores for texts and image files, or facts (such as entities) that it finds in texts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import httpx
import msgspec
import numpy as np

from sie_cli.bodies import LimitedBody
from sie_cli.gateway_client import ModelDescription, described
from sie_cli.refusal import CommandRefused
from sie_client import SIEAsyncClient, SIEClient
from sie_client.core import reading
from sie_client.errors import SIEConnectionError, SIEError
from sie_client.types import Item
from sie_contracts.errors import UNDECODABLE
from sie_contracts.loopback import client_options
from sie_contracts.models.entries import ModelEntry
from sie_contracts.settings import Secret, Settings
from sie_evals.labelled import Fact, FactKind, FactTask, KindSpan, LabelledText
from sie_evals.load import NOBODY, PATIENCE_S, LoadFailure, LoadReply, LoadRequest, Send
from sie_evals.outputs import DENSE, Matrix, VectorOutput, find


class ImagePath(str):
    """Input that is an image: the path of its file."""

    @property
    def path(self) -> Path:
        return Path(self)


def item(text: str) -> str | Item:
    """Convert an input to the form that the client of a cluster accepts."""
    return {"images": [text.path]} if isinstance(text, ImagePath) else text


def key(text: str) -> str:
    """Return the key of an input in the cache: the text itself. For an image, the key has the path, size and time of
    change, so that a changed file has another key.
    """
    if not isinstance(text, ImagePath):
        return text
    status = text.path.stat()
    return f"image {text} {status.st_size} {status.st_mtime_ns}"


def only_texts(name: str, inputs: Sequence[str]) -> None:
    if picture := next((text for text in inputs if isinstance(text, ImagePath)), None):
        raise CommandRefused(f"{name} accepts only texts, and the task has images, such as {picture}")


class EvalSource(Protocol):
    """A source of vectors or scores. `name`: name on the command line. `is_here`: the source computes in this process.
    `scores_pairs`: the source scores documents and has no vectors. `main`: kind of vectors that an evaluation measures
    by default. `identity`: part of the cache key that identifies the model; if empty, results are not cached. `vectors`
    and `scores` raise CommandRefused or SIEError.
    """

    name: str
    is_here: bool
    scores_pairs: bool
    main: VectorOutput
    identity: Sequence[str]
    tokens: int  # number of tokens encoded so far; 0 if unknown

    def vectors(self, texts: Sequence[str], output: VectorOutput, *, is_query: bool) -> Sequence[Any]:
        """Return one vector for each text, of the kind `output`."""

    def scores(self, query: str, documents: Sequence[str]) -> list[float]:
        """Return one score for each document. A higher score is better."""

    def sender(self) -> AbstractAsyncContextManager[Send]:
        """Open the source's connections and yield a function that sends a request. The function raises LoadFailure if
        the request fails. Its calls may overlap.
        """


@runtime_checkable
class FactSource(Protocol):
    """A source that finds facts in texts. EvalSource describes `name`, `is_here` and `identity`."""

    name: str
    is_here: bool
    identity: Sequence[str]

    def facts(self, task: FactTask, texts: Sequence[LabelledText]) -> Sequence[Sequence[Fact]]:
        """Return the facts in each text. Raises CommandRefused or SIEError."""


class Sie:
    """Model of an SIE cluster as a source. `info`: the gateway's description of the loaded model. `only_extracts`: the
    model has neither vectors nor scores.
    """

    is_here = False

    def __init__(
        self, name: str, client: SIEClient, model: str, url: str, token: Secret | None, info: Mapping[str, Any]
    ) -> None:
        self.name, self.url = name, url
        self.token = token
        self._client, self.model = client, model
        self.tokens = 0
        self.info = described(info, ModelDescription)
        outputs = [find(kind) for kind in ("dense", "multivector", "sparse") if kind in self.info.outputs]
        self.scores_pairs = not outputs and "score" in self.info.tasks
        self.only_extracts = not outputs and not self.scores_pairs
        self.main = outputs[0] if outputs else DENSE
        # Read the fingerprint from a response of the model: the `info` of a gateway that has just started may lack it.
        answer: Any = info
        if "text" in self.info.inputs:
            if self.only_extracts:
                answer = client.extract(model, ".", labels=["."])
            else:
                answer = client.score(model, ".", ["."]) if self.scores_pairs else client.encode(model, ".")
        self.fingerprint = str(answer.get("fingerprint") or "")
        self.identity: Sequence[str] = [name, model, self.fingerprint] if self.fingerprint else []

    def machine(self) -> str:
        """Return the machine profile of a worker that has loaded the model, else of any worker, else ""."""
        health = self._client.health()
        with reading({}):
            workers = health["workers"]
            having = [worker for worker in workers if self.model.partition(":")[0] in worker["loaded_models"]]
            return next((str(worker["gpu"]) for worker in [*having, *workers]), "")

    @asynccontextmanager
    async def sender(self) -> AsyncIterator[Send]:
        token = self.token.reveal() if self.token else None
        async with SIEAsyncClient(self.url, api_key=token, wait_for_capacity=False, progress=False) as client:

            async def send(request: LoadRequest) -> LoadReply:
                items = [item(text) for text in request.texts]
                try:
                    if self.scores_pairs:
                        ranked = await client.score(self.model, item(request.query), items)
                        return LoadReply(ranked["usage"]["total_tokens"], _stages(ranked["timing"]))
                    results = await client.encode(self.model, items, on_item_error="fail")
                    return LoadReply(results.usage["total_tokens"], _stages(results[0]["timing"]))
                except SIEConnectionError as error:
                    raise LoadFailure(NOBODY, str(error)) from error
                except SIEError as error:
                    raise LoadFailure(error.code or str(error.status), str(error)) from error

            yield send

    def vectors(self, texts: Sequence[str], output: VectorOutput, *, is_query: bool) -> Sequence[Any]:
        params: Any = output.queries if is_query else output.documents
        items = [item(text) for text in texts]
        results: Any = self._client.encode(
            self.model, items, is_query=is_query, on_item_error="fail", priority="bulk", progress=False, **params
        )
        self.tokens += results.usage["total_tokens"]
        return [output.vector(result) for result in results]

    def scores(self, query: str, documents: Sequence[str]) -> list[float]:
        values = [0.0] * len(documents)
        for result in self._client.rerank(
            self.model, item(query), list(map(item, documents)), priority="bulk", progress=False
        ):
            values[result["index"]] = result["score"]
        return values

    def facts(self, task: FactTask, texts: Sequence[LabelledText]) -> Sequence[Sequence[Fact]]:
        items: list[str | Item] = [
            {"text": text.text, "metadata": {"entities": [_mention(span) for span in text.mentions]}}
            if text.mentions
            else text.text
            for text in texts
        ]
        params: Any = {"on_item_error": "fail", "priority": "bulk", "progress": False}
        if task.kind == "redaction":
            redacted = self._client.redact(self.model, items, task.labels, **params)
            return [[(span["start"], span["end"], span["kind"]) for span in result["spans"]] for result in redacted]
        if not self.info.needs_labels:
            labels = ", ".join(task.labels)
            raise CommandRefused(f"{self.model} has fixed labels: the task {task.name} needs {labels}")
        results: Any = self._client.extract(self.model, items, labels=task.labels, **params)
        return [_FACTS[task.kind](result) for result in results]


def _mention(span: KindSpan) -> dict[str, Any]:
    return {"start": span.start, "end": span.end, "label": span.kind}


def _best_class(result: Mapping[str, Any]) -> list[Fact]:
    ranked = sorted(result["classifications"], key=lambda row: -row["score"])
    return [(row["label"],) for row in ranked[:1]]


_FACTS: Mapping[FactKind, Callable[[Mapping[str, Any]], Sequence[Fact]]] = {
    "entities": lambda result: [(row["start"], row["end"], row["label"]) for row in result["entities"]],
    "relations": lambda result: [(row["head"], row["relation"], row["tail"]) for row in result["relations"]],
    "classes": _best_class,
}


class Patterns:
    """Source that finds personal data with the gateway's redaction patterns, in this process and without a model."""

    is_here = True
    scores_pairs = False
    main = DENSE
    name = "patterns"
    identity: Sequence[str] = ()
    tokens = 0

    def facts(self, task: FactTask, texts: Sequence[LabelledText]) -> Sequence[Sequence[Fact]]:
        from sie_redact.patterns import KINDS, pattern_of, ranges_of

        if task.kind != "redaction":
            raise CommandRefused(
                f"-s {self.name}: patterns cannot answer a task of {task.kind}; choose a task of redaction"
            )
        patterns = [pattern for pattern in map(pattern_of, task.labels) if pattern in KINDS]
        return [[(start, end, pattern) for pattern, start, end in ranges_of(text.text, patterns, "")] for text in texts]

    def vectors(self, texts: Sequence[str], output: VectorOutput, *, is_query: bool) -> Sequence[Any]:
        raise self._refusal()

    def scores(self, query: str, documents: Sequence[str]) -> list[float]:
        raise self._refusal()

    def sender(self) -> AbstractAsyncContextManager[Send]:
        raise self._refusal()

    def _refusal(self) -> CommandRefused:
        return CommandRefused(f"-s {self.name}: patterns have neither vectors nor scores: name a task of redaction")


class SentenceTransformers:
    """Source that runs sentence-transformers in this process, on the CPU in float32. The weights are those of the
    catalogue's entry for the model, or those of the Hugging Face Hub if the catalogue has no such entry.
    """

    is_here = True
    main = DENSE
    tokens = 0

    def __init__(self, model: str, *, scores_pairs: bool) -> None:
        self.name = "st"
        self.scores_pairs = scores_pairs
        import sentence_transformers as library  # `packages` has checked that the library is installed

        where = _weights_of(model)
        kind = library.CrossEncoder if scores_pairs else library.SentenceTransformer
        try:
            # without float(), the library would compute in the dtype of the checkpoint, which may have 16 bits
            self._model = kind(where, device="cpu").float()
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise CommandRefused(f"-s st: sentence-transformers does not load {where}: {reason}") from error
        self._takes_images = not scores_pairs and "image" in self._model.modalities
        files = [file for file in Path(where).rglob("*") if file.is_file()]
        signatures = sorted(f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files)
        self.identity: Sequence[str] = [self.name, library.__version__, where, *signatures]

    def vectors(self, texts: Sequence[str], output: VectorOutput, *, is_query: bool) -> Sequence[Any]:
        only_dense(self.name, output)
        encode = self._model.encode_query if is_query else self._model.encode_document
        if not self._takes_images:
            only_texts(self.name, texts)
        inputs = [_opened(text) if isinstance(text, ImagePath) else text for text in texts]
        return list(np.asarray(encode(inputs, show_progress_bar=False), np.float32))

    def scores(self, query: str, documents: Sequence[str]) -> list[float]:
        only_texts(self.name, [query, *documents])
        pairs = [(query, document) for document in documents]
        return [float(score) for score in self._model.predict(pairs, show_progress_bar=False)]

    @asynccontextmanager
    async def sender(self) -> AsyncIterator[Send]:
        turn = asyncio.Lock()  # no concurrent calls, because a single call of the library uses all cores

        async def send(request: LoadRequest) -> LoadReply:
            async with turn:
                if self.scores_pairs:
                    await asyncio.to_thread(self.scores, request.query, request.texts)
                else:
                    await asyncio.to_thread(self.vectors, request.texts, DENSE, is_query=False)
            return LoadReply()

        yield send


def _opened(picture: ImagePath) -> Any:
    from PIL import Image

    return Image.open(picture.path).convert("RGB")


def _stages(timing: Mapping[str, float]) -> dict[str, float]:
    """Return milliseconds by stage. `timing` has some stages under two names, so use only names that end in `_time`."""
    return {name.removesuffix("_time"): ms for name, ms in timing.items() if name.endswith("_time")}


def only_dense(name: str, output: VectorOutput) -> None:
    if output != DENSE:
        raise CommandRefused(f"{name} has only dense vectors: {output.name} needs a cluster")


def catalogue_entry(model: str) -> ModelEntry | None:
    """Return the entry of a model in the catalogue of this installation; None if the catalogue lacks the model."""
    from sie_config_service.overlay import Overlay

    document = Overlay(Settings()).folders().models.get(model.partition(":")[0], (None, ""))[0]
    return document if isinstance(document, ModelEntry) else None


def _weights_of(model: str) -> str:
    """Return the folder or Hugging Face Hub id from which sentence-transformers loads the weights of a model."""
    from sie_store.weights.sources import package_folder

    entry = catalogue_entry(model)
    if entry is None:
        return model
    weights = entry.weights
    packaged = package_folder(weights.package) if weights.package else None
    return str(packaged or weights.path or weights.hub)


BATCH = 64  # number of texts per request; some servers refuse larger requests
_UNREADABLE = (*UNDECODABLE, TypeError, LookupError, AttributeError)


def _shown(body: bytearray) -> str:
    return body[:200].decode("utf-8", "replace")


@dataclass(frozen=True)
class ServerDialect:
    """Format of a server's requests and answers: paths, functions that build bodies, and functions that read answers.
    A rerank answer has an entry for each document, with the document's position in the field `index`. `score`: name of
    the field with the document's score.
    """

    encode_path: str
    encode_body: Callable[[str, Sequence[str]], Mapping[str, Any]]
    vectors: Callable[[Any], Sequence[Sequence[float]]]
    rerank_body: Callable[[str, str, Sequence[str]], Mapping[str, Any]]
    ranked: Callable[[Any], Sequence[Mapping[str, Any]]]
    score: str
    tokens: Callable[[Any], int | None] = lambda body: None


_OPENAI = ServerDialect(
    "/embeddings",
    # replace an empty text by a space, because these servers refuse an empty text
    lambda model, texts: {"model": model, "input": [text or " " for text in texts], "encoding_format": "float"},
    lambda body: [item["embedding"] for item in sorted(body["data"], key=lambda item: item["index"])],
    lambda model, query, documents: {"model": model, "query": query, "documents": list(documents)},
    lambda body: body["results"],
    "relevance_score",
    lambda body: (body.get("usage") or {}).get("total_tokens"),
)
_TEI = ServerDialect(
    "/embed",
    lambda model, texts: {"inputs": list(texts), "truncate": True},
    lambda body: body,
    lambda model, query, documents: {"query": query, "texts": list(documents), "truncate": True},
    lambda body: body,
    "score",
)
DIALECTS: Mapping[str, ServerDialect] = {"openai": _OPENAI, "infinity": _OPENAI, "tei": _TEI}


class ServerSource:
    """Source that is a server other than SIE."""

    is_here = False
    main = DENSE

    def __init__(
        self, name: str, client: httpx.Client, dialect: ServerDialect, model: str, *, scores_pairs: bool
    ) -> None:
        self.name = name
        self.scores_pairs = scores_pairs
        # empty, so that answers are not cached: the server's model may change between two evaluations
        self.identity: Sequence[str] = ()
        self._client, self._dialect, self._model = client, dialect, model
        self.tokens = 0

    @asynccontextmanager
    async def sender(self) -> AsyncIterator[Send]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        url = str(self._client.base_url)
        options = client_options(url, httpx.AsyncHTTPTransport, limits=limits)
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, **options) as client:

            async def send(request: LoadRequest) -> LoadReply:
                only_texts(self.name, request.texts)
                if self.scores_pairs:
                    path, body = "/rerank", self._dialect.rerank_body(self._model, request.query, request.texts)
                else:
                    path, body = self._dialect.encode_path, self._dialect.encode_body(self._model, request.texts)
                try:
                    async with client.stream("POST", path, json=body) as answer:
                        content = LimitedBody()
                        async for piece in answer.aiter_bytes():
                            content.receive(piece)
                    if answer.status_code != 200:
                        raise LoadFailure(str(answer.status_code), _shown(content))
                    return LoadReply(self._dialect.tokens(msgspec.json.decode(content)))
                except httpx.HTTPError as error:
                    raise LoadFailure(NOBODY, str(error) or type(error).__name__) from error
                except _UNREADABLE as error:
                    raise LoadFailure("NOT_UNDERSTOOD", str(error)[:200]) from error

            yield send

    def vectors(self, texts: Sequence[str], output: VectorOutput, *, is_query: bool) -> Sequence[Any]:
        only_dense(self.name, output)
        only_texts(self.name, texts)
        parts: list[Matrix] = []
        for start in range(0, len(texts), BATCH):
            part = texts[start : start + BATCH]
            body = self._post(self._dialect.encode_path, self._dialect.encode_body(self._model, part))
            with self._understood():
                with np.errstate(over="ignore"):  # an overflow becomes infinity, and infinity is refused below
                    rows = np.asarray(self._dialect.vectors(body), np.float32)
                if rows.ndim != 2 or len(rows) != len(part):
                    raise ValueError(f"{len(part)} texts were sent, vectors of the shape {rows.shape} were returned")
                if parts and rows.shape[1] != parts[0].shape[1]:
                    raise ValueError(
                        f"the first vectors have {parts[0].shape[1]} numbers, later vectors have {rows.shape[1]}"
                    )
                _check_finite(rows)
                self.tokens += self._dialect.tokens(body) or 0
            parts.append(rows)
        return list(np.concatenate(parts))

    def scores(self, query: str, documents: Sequence[str]) -> list[float]:
        only_texts(self.name, [query, *documents])
        values = [0.0] * len(documents)
        for start in range(0, len(documents), BATCH):
            part = documents[start : start + BATCH]
            body = self._post("/rerank", self._dialect.rerank_body(self._model, query, part))
            with self._understood():
                ranked = self._dialect.ranked(body)
                if sorted(row["index"] for row in ranked) != list(range(len(part))):
                    raise ValueError(f"{len(part)} documents were sent, {len(ranked)} scores were returned")
                for entry in ranked:
                    values[start + entry["index"]] = float(entry[self._dialect.score])
                _check_finite(values)
        return values

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        with self._understood():
            try:
                with self._client.stream("POST", path, json=body) as answer:
                    content = LimitedBody()
                    for piece in answer.iter_bytes():
                        content.receive(piece)
            except httpx.HTTPError as error:
                raise CommandRefused(f"{self.name} does not answer: {str(error) or type(error).__name__}") from error
            if answer.status_code != 200:
                raise CommandRefused(f"{self.name}: POST {path} returned {answer.status_code}: {_shown(content)}")
            return msgspec.json.decode(content)

    @contextmanager
    def _understood(self) -> Iterator[None]:
        try:
            yield
        except _UNREADABLE as error:
            raise CommandRefused(
                f"{self.name} does not answer in the format of this kind of server: {error}"
            ) from error


def _check_finite(numbers: Any) -> None:
    if not np.isfinite(numbers).all():
        raise ValueError("the server returned numbers that are not finite")
