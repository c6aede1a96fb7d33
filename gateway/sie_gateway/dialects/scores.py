"""Scores for other APIs: the raw scores of the model, or numbers from 0 to 1 that grow with the relevance."""

from __future__ import annotations

from collections.abc import Callable

from sie_contracts.models.options import altered
from sie_gateway.inference.results import InferRequest, RequestResult


def scaled(*, raw: bool, document_tokens: int = 0) -> Callable[[InferRequest], InferRequest]:
    """Return a function for `ParsedRequest.adjust` of a score request. If `raw` is false, the worker maps scores to
    numbers from 0 to 1, because only the worker knows the meaning of the checkpoint's scores. `document_tokens`:
    largest number of tokens that the model reads of a document; 0: as many as the model accepts.
    """

    def adjust(planned: InferRequest) -> InferRequest:
        run = planned.options.run
        parameters = {**run.parameters, "raw_scores" if raw else "relevance": True}
        most = document_tokens if document_tokens < planned.resolved.entry.max_tokens else 0
        return planned.with_run(altered(run, parameters=parameters, document_tokens=most))

    return adjust


def ranked(finished: RequestResult, name: str) -> tuple[list[float], list[int]]:
    """Return the score of each document, and the indexes of the documents, best first. `name`: field with the
    documents. Raises FailedRequest.
    """
    scores = [outcome.score or 0.0 for _, outcome in finished.succeeded(name)]
    return scores, sorted(range(len(scores)), key=lambda index: (-scores[index], index))
