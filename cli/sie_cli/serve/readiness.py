"""Probes of the processes of `sie serve`. A probe returns why a process is not ready."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

import httpx
import msgspec

from sie_contracts.errors import UNDECODABLE
from sie_contracts.models.load_errors import MAX_ATTEMPTS
from sie_contracts.settings import Secret
from sie_contracts.url_names import quoted

# returns the reason why a process is not ready; None when it is ready
Probe = Callable[[httpx.AsyncClient], Awaitable[str | None]]


_RESTORE = re.compile(r"(Starting restore|Restored \d+ messages) for stream '\S+ > (\S+)'")


def unread_stream(lines: Iterable[str]) -> str:
    """Return the name of the stream that a starting broker is reading; empty if none. `lines`: the broker's output."""
    pending: dict[str, None] = {}
    for line in lines:
        if (match := _RESTORE.search(line)) is not None:
            if match[1].startswith("Starting"):
                pending[match[2]] = None
            else:
                pending.pop(match[2], None)
    return next(iter(pending), "")


async def not_ready(client: httpx.AsyncClient, url: str) -> str | None:
    try:
        answer = await client.get(url)
    except httpx.HTTPError as error:
        return f"no answer ({type(error).__name__})"
    return None if answer.status_code == 200 else answer.text.removeprefix("not ready: ")


async def lacks_workers(client: httpx.AsyncClient, url: str, token: Secret, count: int) -> str | None:
    """Return why the gateway does not have `count` workers yet, according to its /health; None when it has them.

    A worker is ready before its first heartbeat reaches the gateway. Until then, the gateway would refuse requests.
    """
    try:
        answer = await client.get(url, headers={"Authorization": f"Bearer {token.reveal()}"})
    except httpx.HTTPError as error:
        return f"no answer ({type(error).__name__})"
    if answer.status_code != 200:
        return f"{url} answers {answer.status_code}"
    try:
        healthy = int(answer.json()["cluster"]["worker_count"])
    except (*UNDECODABLE, KeyError, TypeError):
        return f"{url} does not answer as a gateway of SIE does"
    return None if healthy >= count else f"{healthy} of {count} healthy"


@dataclass(frozen=True)
class FailedLoad:
    """Model whose load failed on all workers that tried it. `attempts`: the smallest number of attempts among these
    workers. `is_permanent`: no worker tries again.
    """

    message: str
    attempts: int
    is_permanent: bool

    @property
    def is_final(self) -> bool:
        """Return whether no worker will try to preload this model again."""
        return self.is_permanent or self.attempts >= MAX_ATTEMPTS

    def __str__(self) -> str:
        return (
            f"attempt {self.attempts} of {MAX_ATTEMPTS} to load it failed, the next follows within a minute: "
            f"{self.message}"
        )


class _HostFailure(msgspec.Struct):
    message: str
    attempts: int
    permanent: bool


class _HostFields(msgspec.Struct):
    error: _HostFailure | None


class _ModelLoads(msgspec.Struct):
    state: str = ""
    hosts: tuple[_HostFields, ...] = ()


async def failed_load(client: httpx.AsyncClient, url: str, token: Secret, model: str) -> FailedLoad | None:
    """Return the failed load of a model, as reported by a gateway. None if no load failed, if a worker has loaded or is
    loading the model, or if the gateway does not describe the model.
    """
    try:
        answer = await client.get(
            f"{url}/v1/models/{quoted(model, 'model')}", headers={"Authorization": f"Bearer {token.reveal()}"}
        )
        answer.raise_for_status()
        info = msgspec.json.decode(answer.content, type=_ModelLoads)
    except (httpx.HTTPError, *UNDECODABLE):
        return None  # the probe of the gateway reports this error
    errors = [host.error for host in info.hosts if host.error is not None]
    if info.state != "failed" or not errors:
        return None
    attempts = min(error.attempts for error in errors)
    return FailedLoad(errors[0].message, attempts, all(error.permanent for error in errors))
