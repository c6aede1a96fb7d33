"""Callers of `sie mcp`. Only the gateway knows the name of an API key, so `KeyNames` asks the gateway."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from sie_client import AuthenticationError, SIEAsyncClient, SIEError
from sie_runtime.keys import digest_of

CHECK_EVERY_S = 30.0
# While the gateway cannot check a key, for example because it is down, the key stays accepted until this number of
# seconds after its last successful check.
AWAY_S = 900.0
MAX_KEYS = 1024
WAIT_S = 2.0


@dataclass(frozen=True)
class AgentCaller:
    """Caller of a tool. `owner`: identifies the API key; limits count per owner. `session`: id of the caller's session;
    the store returns a result only to its owner in its session. `key_name`: name of the API key; None for the user of
    this process.
    """

    api_key: str | None = field(repr=False)
    owner: str
    session: str
    key_name: str | None


class KeyNames:
    """Names of API keys, from the gateway's `GET /v1/whoami`. `name_of` requests a name again after CHECK_EVERY_S."""

    def __init__(self, gateway_url: str, clock: Callable[[], float] = time.monotonic) -> None:
        # this client has no key of its own, because each check sends the key that is checked
        self._client = SIEAsyncClient(
            gateway_url, api_key=None, connection_budget_s=WAIT_S, capacity_budget_s=WAIT_S, progress=False
        )
        self._clock = clock
        self._names: OrderedDict[str, tuple[str, float]] = OrderedDict()  # key's digest -> name, time of check

    async def name_of(self, api_key: str) -> str:
        """Return the name of a key. Raises AuthenticationError if the gateway refuses the key. If the check fails for a
        different reason, return the name that the gateway returned in the last AWAY_S seconds. Raises SIEError if it
        returned none in this time.
        """
        digest = digest_of(api_key)
        name, checked_s = self._names.get(digest, ("", float("-inf")))
        if self._clock() - checked_s < CHECK_EVERY_S:
            return name
        try:
            name = await self._checked(api_key)
        except AuthenticationError:
            self._names.pop(digest, None)
            raise
        except SIEError:
            if self._clock() - checked_s < AWAY_S:
                return name
            raise
        self._names[digest] = name, self._clock()
        self._names.move_to_end(digest)
        if len(self._names) > MAX_KEYS:
            self._names.popitem(last=False)
        return name

    async def close(self) -> None:
        await self._client.close()

    async def _checked(self, api_key: str) -> str:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        return str((await self._client.whoami(headers=headers))["name"])
