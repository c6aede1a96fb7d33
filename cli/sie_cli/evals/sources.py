"""Who answers: a cluster, a library in this process, or a server of somebody else.

Each gives vectors of texts, or scores of documents, for a model that it knows by name.

    sie, sie:URL ──► SIEClient        st ──► sentence-transformers in this process
    openai:URL, infinity:URL ──► POST URL/embeddings, URL/rerank      tei:URL ──► POST URL/embed, URL/rerank
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sie_cli.refusal import Refused

if TYPE_CHECKING:
    import httpx

    from sie_sdk import SIEClient

BATCH = 64  # texts of a request to a server of somebody else, which may take no more
PATIENCE_S = 60.0  # with an answer of such a server
Matrix = NDArray[np.float32]
Told = Callable[[int], None]  # hears of so many texts that are done


class Source(Protocol):
    """`name`: as the user gave it. `scores_pairs`: it scores documents and has no vectors. Both raise Refused."""

    name: str
    scores_pairs: bool

    def vectors(self, texts: Sequence[str], *, is_query: bool) -> Matrix:
        """float32 [texts, width], of any length."""

    def scores(self, query: str, documents: Sequence[str]) -> list[float]:
        """One of each document, more is better."""


class Sie:
    """A model of a cluster."""

    def __init__(self, name: str, client: SIEClient, model: str) -> None:
        self.name = name
        self._client, self._model = client, model
        info = client.get_model(model)
        self.scores_pairs = "dense" not in info["dims"]
        if self.scores_pairs and "score" not in info["tasks"]:
            raise Refused(
                f"{model} has {', '.join(info['outputs'])}: a quality is measured of models with dense vectors and of"
                " those that score"
            )

    def vectors(self, texts: Sequence[str], *, is_query: bool) -> Matrix:
        results = self._client.encode(
            self._model,
            list(texts),
            is_query=is_query,
            output_types=["dense"],
            output_dtype="float32",
            on_item_error="fail",
            priority="bulk",
        )
        return np.stack([np.asarray(result["dense"], np.float32) for result in results])

    def scores(self, query: str, documents: Sequence[str]) -> list[float]:
        found = [0.0] * len(documents)
        for each in self._client.rerank(self._model, query, list(documents), priority="bulk"):
            found[each["index"]] = each["score"]
        return found


class SentenceTransformers:
    """The public library in this process, on the weights that the catalogue names, in float32."""

    def __init__(self, model: str, *, scores_pairs: bool) -> None:
        self.name = "st"
        self.scores_pairs = scores_pairs
        try:
            import sentence_transformers
        except ImportError as error:
            raise Refused("-s st needs a package that is not installed: pip install sentence-transformers") from error
        where = _weights_of(model)
        kind: Any = sentence_transformers.CrossEncoder if scores_pairs else sentence_transformers.SentenceTransformer
        try:
            self._model = kind(where, device="cpu")
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise Refused(f"-s st: sentence-transformers does not load {where}: {reason}") from error

    def vectors(self, texts: Sequence[str], *, is_query: bool) -> Matrix:
        encode = self._model.encode_query if is_query else self._model.encode_document
        return np.asarray(encode(list(texts), show_progress_bar=False), np.float32)

    def scores(self, query: str, documents: Sequence[str]) -> list[float]:
        pairs = [(query, document) for document in documents]
        return [float(score) for score in self._model.predict(pairs, show_progress_bar=False)]


@dataclass(frozen=True)
class Dialect:
    """How a server is asked: paths and bodies, and where its answers have what is wanted. A list of results has the
    place of each in `index`.
    """

    encode_path: str
    encode_body: Callable[[str, Sequence[str]], Mapping[str, Any]]
    vectors: Callable[[Any], Sequence[Sequence[float]]]
    rerank_body: Callable[[str, str, Sequence[str]], Mapping[str, Any]]
    ranked: Callable[[Any], Sequence[Mapping[str, Any]]]
    score: str


_OPENAI = Dialect(
    "/embeddings",
    lambda model, texts: {"model": model, "input": list(texts), "encoding_format": "float"},
    lambda body: [each["embedding"] for each in sorted(body["data"], key=lambda each: each["index"])],
    lambda model, query, documents: {"model": model, "query": query, "documents": list(documents)},
    lambda body: body["results"],
    "relevance_score",
)
_TEI = Dialect(
    "/embed",
    lambda model, texts: {"inputs": list(texts), "truncate": True},
    lambda body: body,
    lambda model, query, documents: {"query": query, "texts": list(documents), "truncate": True},
    lambda body: body,
    "score",
)
DIALECTS: Mapping[str, Dialect] = {"openai": _OPENAI, "infinity": _OPENAI, "tei": _TEI}


class Server:
    """A server of somebody else."""

    def __init__(self, name: str, client: httpx.Client, dialect: Dialect, model: str, *, scores_pairs: bool) -> None:
        self.name = name
        self.scores_pairs = scores_pairs
        self._client, self._dialect, self._model = client, dialect, model

    def vectors(self, texts: Sequence[str], *, is_query: bool) -> Matrix:
        parts: list[Matrix] = []
        for start in range(0, len(texts), BATCH):
            part = texts[start : start + BATCH]
            body = self._asked(self._dialect.encode_path, self._dialect.encode_body(self._model, part))
            with self._understood():
                rows = np.asarray(self._dialect.vectors(body), np.float32)
                if rows.ndim != 2 or len(rows) != len(part):
                    raise ValueError(f"{len(part)} texts were sent, vectors of the shape {rows.shape} came")
            parts.append(rows)
        return np.concatenate(parts)

    def scores(self, query: str, documents: Sequence[str]) -> list[float]:
        found = [0.0] * len(documents)
        for start in range(0, len(documents), BATCH):
            part = documents[start : start + BATCH]
            body = self._asked("/rerank", self._dialect.rerank_body(self._model, query, part))
            with self._understood():
                ranked = self._dialect.ranked(body)
                if sorted(each["index"] for each in ranked) != list(range(len(part))):
                    raise ValueError(f"{len(part)} documents were sent, {len(ranked)} scores came")
                for each in ranked:
                    found[start + each["index"]] = float(each[self._dialect.score])
        return found

    def _asked(self, path: str, body: Mapping[str, Any]) -> Any:
        import httpx

        try:
            answer = self._client.post(path, json=body)
        except httpx.HTTPError as error:
            raise Refused(f"{self.name} does not answer: {error or type(error).__name__}") from error
        if answer.status_code != 200:
            raise Refused(f"{self.name}: POST {path} answers {answer.status_code}: {answer.text[:200]}")
        with self._understood():
            return answer.json()

    @contextmanager
    def _understood(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, KeyError, TypeError, LookupError) as error:
            raise Refused(f"{self.name} answers otherwise than such a server does: {error}") from error


def _weights_of(model: str) -> str:
    """What sentence-transformers is to load: the folder of the package that the catalogue names, its own folder, or an
    id of the hub.
    """
    from sie_config.overlay import Overlay
    from sie_contracts.entries import ModelEntry
    from sie_contracts.settings import Settings
    from sie_store.sources import package_folder

    known = Overlay(Settings()).folders().models.get(model.partition(":")[0], (None, ""))[0]
    if not isinstance(known, ModelEntry):
        return model
    weights = known.weights
    packaged = package_folder(weights.package) if weights.package else None
    folder: Path | str = packaged or weights.path or weights.hub
    return str(folder)
