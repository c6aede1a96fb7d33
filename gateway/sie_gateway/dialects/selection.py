"""Choice of the model for a request that need not name one (contract 17.1): the named one, else the configured one,
else the only one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from sie_contracts.errors import InvalidInput
from sie_contracts.models.catalogue import Resolved
from sie_contracts.models.entries import classifies
from sie_contracts.models.option_values import describe
from sie_gateway.fleet.capabilities import CAN
from sie_gateway.inference.call import Call

if TYPE_CHECKING:
    from sie_gateway.inference.handler import Inference

Capability = Literal["embed", "embed_sparse", "embed_all", "rerank", "predict"]

_VERBS: dict[Capability, str] = {
    "embed": "encode",
    "embed_sparse": "encode",
    "embed_all": "encode",
    "rerank": "score",
    "predict": "extract",
}
_MISSING = {"encode": "gives no vectors", "score": "gives no scores", "extract": "has no classes of its own to predict"}


NOT_NAMED = "default/not-specified"  # what Infinity's client sends where its user names no model


def able(inference: Inference, call: Call, capability: Capability, named: Any = None) -> Resolved:
    """The model that `model_for` chooses, if it has the task that the route is for.

    Raises InvalidInput with reason unsupported_output (vectors) or unsupported_task, which names the route of what the
    model does, and what `model_for` raises. To be called before the fields of the body are read: these are named
    otherwise where the model does something else.
    """
    resolved = model_for(inference, call, capability, named)
    if _VERBS[capability] not in resolved.entry.tasks or (capability == "predict" and not classifies(resolved.entry)):
        raise unable(resolved, capability)
    return resolved


def unable(resolved: Resolved, capability: Capability) -> InvalidInput:
    """Message for a model that the route does not serve: the routes that serve it."""
    verb = _VERBS[capability]
    routes = " and ".join(f"POST /v1/{task}/{resolved.requested}" for task in resolved.entry.tasks)
    message = f"{resolved.requested} {_MISSING[verb]}; what it does is at {routes}"
    return InvalidInput(message, reason="unsupported_output" if verb == "encode" else "unsupported_task", param="model")


def model_for(inference: Inference, call: Call, capability: Capability, named: Any = None) -> Resolved:
    """The model of the path, else `named` (of the body), else that of SIE_DEFAULT_MODELS, else the only one that can.

    Raises InvalidInput with reason model_required, and what `Inference.resolve` raises.
    """
    if call.resolved is not None:
        return call.resolved
    if named is not None and not isinstance(named, str):
        raise InvalidInput(f"model: expected a string, got {describe(named)}", reason="schema", param="model")
    if named and named != NOT_NAMED:
        return inference.resolve(named, call, CAN[capability])
    defaults = inference.default_models
    if default := defaults.get(capability, defaults.get("embed") if capability == "embed_all" else None):
        return inference.resolve(default, call)
    able = [entry.id for entry in inference.catalogue.entries.values() if CAN[capability](entry)]
    if len(able) == 1:
        return inference.resolve(able[0])
    here = f"{len(able)} models here could do this" if able else "no model here can do this"
    message = f"model: expected the name of a model; {here}, and SIE_DEFAULT_MODELS names none for {capability}"
    raise InvalidInput(message, reason="model_required", param="model")
