"""Errors of the gateway as sentences for an agent: what happened, and what to do about it."""

from __future__ import annotations

from sie_client import errors

MAX_CHARS = 500
MAX_SUGGESTIONS = 5
GATEWAY_AWAY = (
    "The gateway does not answer: it is down, restarting or unreachable from here. Try again in a minute; if that does "
    "not help, tell the operator."
)
_BUSY = "The gateway has no capacity at the moment: {message}. Call again in a minute."
_LOADING = "The model is not ready yet: {message}. Call again in a minute; loading goes on meanwhile."
# class of errors -> sentences; for an error of several of these classes, the class that comes first counts
_SENTENCES: dict[type[errors.SIEError], str] = {
    errors.PermissionDeniedError: (
        "The API key may not do this: {message}. Use a key that has this scope; the operator makes one with "
        "`sie keys create NAME --scopes SCOPES`."
    ),
    errors.AuthenticationError: (
        "The gateway does not accept the API key: {message}. Set a valid key in the settings of this server."
    ),
    errors.ModelNotFoundError: "The gateway has no such model: {message}.{near} list_models shows all models.",
    errors.NotFoundError: "There is no such thing at the gateway: {message}. Check the id.",
    errors.PayloadTooLargeError: "The input is too large: {message}. Send less at once, or split the document.",
    errors.SIEConnectionError: GATEWAY_AWAY,
    errors.RateLimitedError: "The quota of the API key is used up: {message}. Wait a minute and call again.",
    errors.ModelLoadingError: _LOADING,
    errors.LoraLoadingError: _LOADING,
    errors.ProvisioningError: _LOADING,
    errors.ModelLoadFailedError: "The model cannot be loaded: {message}. Use another model, and tell the operator.",
    errors.RequestTimeoutError: "The answer took too long: {message}. Send less at once, or call again later.",
    errors.QueueFullError: _BUSY,
    errors.QueueUnavailableError: _BUSY,
    errors.ResourceExhaustedError: _BUSY,
    errors.ShuttingDownError: _BUSY,
    errors.NotReadyError: _BUSY,
}


def sentence_of(error: errors.SIEError) -> str:
    """Return the sentences for an error of the client."""
    message = _message(error)
    for kind, text in _SENTENCES.items():
        if isinstance(error, kind):
            names = [str(name) for name in error.details.get("suggestions") or ()][:MAX_SUGGESTIONS]
            return text.format(message=message, near=f" Similar names: {', '.join(names)}." if names else "")
    if isinstance(error, errors.InvalidInputError) and not error.status:
        return f"The arguments do not fit: {message}. Change them and call again."
    if isinstance(error, errors.RequestError) or error.status == 400:
        return f"The gateway refuses the input: {message}. Change it and call again."
    request = f" (request {error.request_id})" if error.request_id else ""
    return f"The gateway failed{request}: {message}. Call again; if it fails again, tell the operator."


def _message(error: errors.SIEError) -> str:
    """Return the error's message without its code and without a final stop, at most MAX_CHARS long."""
    message = " ".join(str(error).split()).removeprefix(f"{error.code}: ")
    return message[:MAX_CHARS].rstrip(". ")
