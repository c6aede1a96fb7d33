"""Errors of the gateway as sentences for an agent: what happened, and what to do about it."""

from __future__ import annotations

from sie_client import errors

_BUSY = (
    errors.QueueFullError,
    errors.QueueUnavailableError,
    errors.ResourceExhaustedError,
    errors.ShuttingDownError,
    errors.NotReadyError,
)
_LOADING = (errors.ModelLoadingError, errors.LoraLoadingError, errors.ProvisioningError)
MAX_CHARS = 500
MAX_SUGGESTIONS = 5
GATEWAY_AWAY = (
    "The gateway does not answer: it is down, restarting or unreachable from here. Try again in a minute; if that does "
    "not help, tell the operator."
)


def sentence_of(error: errors.SIEError) -> str:
    """Return the sentences for an error of the client."""
    message = _message(error)
    if isinstance(error, errors.PermissionDeniedError):
        return (
            f"The API key may not do this: {message}. Use a key that has this scope; the operator makes one with "
            "`sie keys create NAME --scopes SCOPES`."
        )
    if isinstance(error, errors.AuthenticationError):
        return f"The gateway does not accept the API key: {message}. Set a valid key in the settings of this server."
    if isinstance(error, errors.ModelNotFoundError):
        names = [str(name) for name in error.details.get("suggestions") or ()][:MAX_SUGGESTIONS]
        near = f" Similar names: {', '.join(names)}." if names else ""
        return f"The gateway has no such model: {message}.{near} list_models shows all models."
    if isinstance(error, errors.NotFoundError):
        return f"There is no such thing at the gateway: {message}. Check the id."
    if isinstance(error, errors.PayloadTooLargeError):
        return f"The input is too large: {message}. Send less at once, or split the document."
    if isinstance(error, errors.SIEConnectionError):
        return GATEWAY_AWAY
    if isinstance(error, errors.RateLimitedError):
        return f"The quota of the API key is used up: {message}. Wait a minute and call again."
    if isinstance(error, _LOADING):
        return f"The model is not ready yet: {message}. Call again in a minute; loading goes on meanwhile."
    if isinstance(error, errors.ModelLoadFailedError):
        return f"The model cannot be loaded: {message}. Use another model, and tell the operator."
    if isinstance(error, errors.RequestTimeoutError):
        return f"The answer took too long: {message}. Send less at once, or call again later."
    if isinstance(error, _BUSY):
        return f"The gateway has no capacity at the moment: {message}. Call again in a minute."
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
