"""Sources of vectors and scores: a cluster, or a library in this process. Those of other servers are in `servers`. An
input is a text or an image of a file.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from sie_cli.evals.load import NOBODY, LoadFailure, LoadReply, LoadRequest, Send
from sie_cli.evals.outputs import DENSE, VectorOutput, find
from sie_cli.refusal import CommandRefused
from sie_contracts.settings import Secret

if TYPE_CHECKING:
    from sie_client import SIEClient
    from sie_client.types import Item


class ImagePath(str):
    """An image, by the path of its file."""

    @property
    def path(self) -> Path:
        return Path(self)


def item(text: str) -> str | Item:
    """As a client of a cluster takes it."""
    return {"images": [text.path]} if isinstance(text, ImagePath) else text


def key(text: str) -> str:
    """What tells it from every other one. A file that was written again is another one."""
    if not isinstance(text, ImagePath):
        return text
    status = text.path.stat()
    return f"image {text} {status.st_size} {status.st_mtime_ns}"


def only_texts(name: str, inputs: Sequence[str]) -> None:
    """Raises CommandRefused for a source that takes no images."""
    if picture := next((text for text in inputs if isinstance(text, ImagePath)), None):
        raise CommandRefused(f"{name} takes texts alone, and the task has images, such as {picture}")


class EvalSource(Protocol):
    """`name`: as the user gave it. `is_here`: it computes in this process. `scores_pairs`: it scores documents and has
    no vectors. `main`: the vectors that are measured unless others are asked for. `identity`: what its answers depend
    on beside texts and output; empty where nobody knows. `vectors` and `scores` raise Refused or SIEError.
    """

    name: str
    is_here: bool
    scores_pairs: bool
    main: VectorOutput
    identity: Sequence[str]

    def vectors(self, texts: Sequence[str], output: VectorOutput, *, is_query: bool) -> Sequence[Any]:
        """One of each text, as `output` has them."""

    def scores(self, query: str, documents: Sequence[str]) -> list[float]:
        """One of each document, more is better."""

    def sender(self) -> AbstractAsyncContextManager[Send]:
        """What sends requests at once, each of which raises Failed."""


class Sie:
    """A model of a cluster. `info`: what the cluster says of the model once it is loaded."""

    is_here = False

    def __init__(
        self, name: str, client: SIEClient, model: str, url: str, token: Secret | None, info: Mapping[str, Any]
    ) -> None:
        self.name, self.url = name, url
        self.token = token
        self._client, self._model = client, model
        self.info = info
        outputs = [find(kind) for kind in ("dense", "multivector", "sparse") if kind in self.info["outputs"]]
        self.scores_pairs = not outputs
        self.main = outputs[0] if outputs else DENSE
        if self.scores_pairs and "score" not in self.info["tasks"]:
            names = ", ".join(self.info["outputs"])
            raise CommandRefused(f"{model} has {names}: what is measured are models with vectors, and those that score")
        # by an answer: a gateway that has just started may not have heard of the workers that give it
        answer: Any = self.info
        if "text" in self.info["inputs"]:
            answer = client.score(model, ".", ["."]) if self.scores_pairs else client.encode(model, ".")
        self.fingerprint = str(answer.get("fingerprint") or "")
        self.identity: Sequence[str] = [name, model, self.fingerprint] if self.fingerprint else []

    def machine(self) -> str:
        """The machine profile of a worker that has the model; empty where the cluster tells none."""
        workers = self._client.health()["workers"]
        having = [worker for worker in workers if self._model.partition(":")[0] in worker["loaded_models"]]
        return next((str(worker["gpu"]) for worker in [*having, *workers]), "")

    @asynccontextmanager
    async def sender(self) -> AsyncIterator[Send]:
        from sie_client import SIEAsyncClient
        from sie_client.errors import SIEConnectionError, SIEError

        token = self.token.reveal() if self.token else None
        async with SIEAsyncClient(self.url, api_key=token, wait_for_capacity=False, progress=False) as client:

            async def send(request: LoadRequest) -> LoadReply:
                items = [item(text) for text in request.texts]
                try:
                    if self.scores_pairs:
                        ranked = await client.score(self._model, item(request.query), items)
                        return LoadReply(ranked["usage"]["total_tokens"], _stages(ranked["timing"]))
                    results = await client.encode(self._model, items, on_item_error="fail")
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
            self._model, items, is_query=is_query, on_item_error="fail", priority="bulk", progress=False, **params
        )
        return [result[output.slot] for result in results]

    def scores(self, query: str, documents: Sequence[str]) -> list[float]:
        values = [0.0] * len(documents)
        for result in self._client.rerank(
            self._model, item(query), list(map(item, documents)), priority="bulk", progress=False
        ):
            values[result["index"]] = result["score"]
        return values


class SentenceTransformers:
    """The public library in this process, on the weights that the catalogue names, in float32."""

    is_here = True
    main = DENSE

    def __init__(self, model: str, *, scores_pairs: bool) -> None:
        self.name = "st"
        self.scores_pairs = scores_pairs
        try:
            import sentence_transformers
        except ImportError as error:
            raise CommandRefused(
                "-s st needs a package that is not installed: pip install sentence-transformers"
            ) from error
        where = _weights_of(model)
        kind: Any = sentence_transformers.CrossEncoder if scores_pairs else sentence_transformers.SentenceTransformer
        try:
            self._model = kind(where, device="cpu")
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise CommandRefused(f"-s st: sentence-transformers does not load {where}: {reason}") from error
        self._takes_images = not scores_pairs and "image" in self._model.modalities
        files = [file for file in Path(where).rglob("*") if file.is_file()]
        signatures = sorted(f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files)
        self.identity: Sequence[str] = [self.name, sentence_transformers.__version__, where, *signatures]

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
        turn = asyncio.Lock()  # the library runs one call at a time on all cores

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
    """Milliseconds by stage, each once: `timing` has some of them under two names."""
    return {name.removesuffix("_time"): ms for name, ms in timing.items() if name.endswith("_time")}


def only_dense(name: str, output: VectorOutput) -> None:
    """Raises CommandRefused for what a source other than a cluster does not have."""
    if output != DENSE:
        raise CommandRefused(f"{name} has dense vectors alone: {output.name} is measured of a cluster")


def _weights_of(model: str) -> str:
    """What sentence-transformers is to load: the folder of the package that the catalogue names, its own folder, or an
    id of the hub.
    """
    from sie_config_service.overlay import Overlay
    from sie_contracts.models.entries import ModelEntry
    from sie_contracts.settings import Settings
    from sie_store.weights.sources import package_folder

    entry = Overlay(Settings()).folders().models.get(model.partition(":")[0], (None, ""))[0]
    if not isinstance(entry, ModelEntry):
        return model
    weights = entry.weights
    packaged = package_folder(weights.package) if weights.package else None
    folder: Path | str = packaged or weights.path or weights.hub
    return str(folder)
