"""Client families: each file turns requests of one family into what is asked of a model, and the outcome into that
family's reply.

    path ──find──► Route ──handler──► Asked ──Inference.run──► Finished ──► Answer

What a model computes is decided in between, once, so every family gets the same numbers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from sie_gateway.call import Answer, Call, ErrorShape, family, native_shape
from sie_gateway.dialects import cohere, infinity, native, openai, rerank, tei
from sie_gateway.inference import Inference

Handler = Callable[[Inference, Call, bytes], Awaitable[Answer]]


@dataclass(frozen=True)
class Route:
    """What answers a call. `model`: the name in the path, which is looked up before the body is read; None where the
    body names it.

    `endpoint` is its name in metrics and logs. Only a native route says "not yet" with 202.
    """

    endpoint: str
    handler: Handler
    model: str | None = None
    shape: ErrorShape = native_shape
    is_native: bool = False
    method: str = "POST"


_NATIVE: dict[str, tuple[str, Handler]] = {
    "/v1/encode/": ("encode", native.encode),
    "/v1/score/": ("score", native.score),
    "/v1/extract/": ("extract", native.extract),
}
_BY_PATH: dict[str, Route] = {
    **{
        f"/{name}": Route(name, handler, shape=tei.shape)
        for name, handler in tei.HANDLERS.items()
        if name not in ("", "rerank")
    },
    "/info": Route("info", tei.info, shape=tei.shape, method="GET"),
    **dict.fromkeys(("/v1/embeddings", "/embeddings"), Route("embeddings", openai.embeddings, shape=family("openai"))),
    "/v1/rerank": Route("rerank", rerank.v1, shape=family("jina")),
    "/v2/rerank": Route("rerank", rerank.v2, shape=family("cohere")),
    "/rerank": Route("rerank", rerank.either, shape=family("infinity")),
    "/v1/embed": Route("embed", cohere.v1, shape=family("cohere")),
    "/v2/embed": Route("embed", cohere.v2, shape=family("cohere")),
    **dict.fromkeys(("/v1/classify", "/classify"), Route("classify", infinity.classify, shape=family("infinity"))),
}
_TEI = "/tei/"


def find(method: str, path: str) -> Route | None:
    """The route of an inference path; None for any other."""
    for prefix, (endpoint, handler) in _NATIVE.items():
        if path.startswith(prefix):
            return Route(endpoint, handler, path.removeprefix(prefix), is_native=True)
    if path.startswith(_TEI):
        return _named(path.removeprefix(_TEI).removesuffix("/"))
    if path == "/" and method == "POST":  # a GET is a page for people
        return _MAIN
    return _BY_PATH.get(path)


_MAIN = Route("main_task", tei.main_task, shape=tei.shape)


def _named(rest: str) -> Route:
    """A TEI route of the model in its path: a known last part is the route, all before it the model."""
    model, _, name = rest.rpartition("/")
    if model and name == "info":
        return Route("info", tei.info, model, tei.shape, method="GET")
    if model and name and name in tei.HANDLERS:
        return Route(name, tei.HANDLERS[name], model, tei.shape)
    return Route(_MAIN.endpoint, _MAIN.handler, rest, tei.shape)
