"""Connection of a process to the broker, and the reasons why the process is not ready."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator

from sie_broker import Broker, BrokerError, Connection
from sie_contracts.settings import Secret, SettingError
from sie_runtime.process import Stop, retry

_logger = logging.getLogger("sie.broker")


def because(text: str, broker: Connection) -> str:
    """Return `text`, the reason why a process is not ready, plus problems of the broker that may be the cause."""
    causes = "; ".join(f"{name} cannot be used: {why}" for name, why in sorted(broker.troubles.items()))
    return f"{text}: {causes}" if causes else text


@contextlib.asynccontextmanager
async def connected(
    url: str | None, name: str, stop: Stop, *, password: Secret | None, user: str = ""
) -> AsyncIterator[Broker | None]:
    """Connect to the broker at `url`, and close the connection at the end of the context. Yields None if `stop` is
    requested before the connection succeeds. Raises SettingError if `url` is None.
    """
    from sie_broker.nats import connect

    if url is None:
        raise SettingError("SIE_NATS_URL", f"{name} needs a broker: set the URL of NATS")
    broker: Broker | None = await retry(
        lambda: connect(url, name=name, password=password, user=user),
        errors=(BrokerError,),
        stop=stop,
        logger=_logger,
        task="connecting to the broker",
    )
    try:
        yield broker
    finally:
        if broker is not None:
            await broker.close()
