"""Scores as other makers of rerankers answer them: from 0 to 1, in the order of the model's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sie_contracts.models.options import altered
from sie_gateway.inference.call import Asked, Call
from sie_gateway.inference.results import Finished

if TYPE_CHECKING:
    from sie_gateway.inference.handler import Inference


async def scored(inference: Inference, call: Call, request: Asked, *, raw: bool, document_tokens: int = 0) -> Finished:
    """Run a score, from 0 to 1 unless `raw`. The worker maps it: only there it is known what a checkpoint's scores
    mean.

    Of a document at most `document_tokens` are read, 0: as many as there is room for.
    """
    understood = inference.understand(call, request)
    run = understood.options.run
    parameters = {**run.parameters, "raw_scores" if raw else "relevance": True}
    most = document_tokens if document_tokens < understood.resolved.entry.max_tokens else 0
    run = altered(run, parameters=parameters, document_tokens=most)
    return await inference.execute(call, understood.with_run(run))
