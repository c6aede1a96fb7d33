"""Choice of the model for a request that may leave out the name of the model. Without a name, the request gets the
default model of the settings. Without a default, it gets the only model with the capability.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from sie_contracts.errors import InvalidInput
from sie_contracts.models.catalogue import Resolved
from sie_contracts.models.option_values import bad
from sie_gateway.fleet.capabilities import CAN
from sie_gateway.inference.call import Call

if TYPE_CHECKING:
    from sie_gateway.inference.handler import Inference

Capability = Literal["embed", "embed_sparse", "embed_all", "rerank", "predict", "transcribe", "redact"]

_VERBS: dict[Capability, str] = {
    **dict.fromkeys(("embed", "embed_sparse", "embed_all"), "encode"),
    "rerank": "score",
    **dict.fromkeys(("predict", "transcribe", "redact"), "extract"),
}
_MISSING: dict[Capability, str] = {
    **dict.fromkeys(("embed", "embed_sparse", "embed_all"), "gives no vectors"),
    "rerank": "gives no scores",
    "predict": "has no classes of its own to predict",
    "transcribe": "does not transcribe speech",
    "redact": "gives no entities with their places in a text",
}
# capabilities that a model may lack although it has the task of the route
_CHECKED: tuple[Capability, ...] = ("predict", "transcribe", "redact")


NOT_NAMED = "default/not-specified"  # name that Infinity's client sends if its user names no model


def able(inference: Inference, call: Call, capability: Capability, named: Any = None) -> Resolved:
    """Return the model that `model_for` chooses, if it has the task of the route.

    Raises InvalidInput if the model lacks the task: with the reason `unsupported_output` on a route for vectors,
    `unsupported_task` on other routes. The message names the routes that the model supports. Raises the errors of
    `model_for`. Call `able` before other fields of the body are read: a body for another task has other fields, so an
    error about a field would hide that the task is wrong.
    """
    return checked(model_for(inference, call, capability, named), capability)


def checked(resolved: Resolved, capability: Capability) -> Resolved:
    """Return the model if it can serve a route with this capability. Raises the InvalidInput errors of `able`."""
    entry = resolved.entry
    if _VERBS[capability] not in entry.tasks or (capability in _CHECKED and not CAN[capability](entry)):
        raise unable(resolved, capability)
    return resolved


def unable(resolved: Resolved, capability: Capability) -> InvalidInput:
    """Return the error for a model without the task of the route. The error names the routes that serve the model."""
    verb = _VERBS[capability]
    routes = " and ".join(f"POST /v1/{task}/{resolved.requested}" for task in resolved.entry.tasks)
    message = f"{resolved.requested} {_MISSING[capability]}; use {routes}"
    return InvalidInput(message, reason="unsupported_output" if verb == "encode" else "unsupported_task", param="model")


def model_for(inference: Inference, call: Call, capability: Capability, named: Any = None) -> Resolved:
    """Return the first of these models that is set: the model in the path; `named` (from the body); the default for
    the capability in SIE_DEFAULT_MODELS; for `embed_all`, the default for `embed`. If none is set, return the only
    model with the capability.

    Raises InvalidInput with the reason `schema` or `model_required`, and the errors of `Inference.resolve`.
    """
    if call.resolved is not None:
        return call.resolved
    if named is not None and not isinstance(named, str):
        raise bad("model", named, "a string")
    if named and named != NOT_NAMED:
        return inference.resolve(named, call, CAN[capability])
    defaults = inference.default_models
    if default := defaults.get(capability, defaults.get("embed") if capability == "embed_all" else None):
        return inference.resolve(default, call)
    able = [entry.id for entry in inference.catalogue.entries.values() if CAN[capability](entry)]
    if len(able) == 1:
        return inference.resolve(able[0])
    here = f"{len(able)} models here could do this" if able else "no model here can do this"
    message = f"expected the name of a model; {here}, and SIE_DEFAULT_MODELS names none for {capability}"
    raise InvalidInput.at("model", message, reason="model_required")
