"""Connection of a process of the cluster to its broker."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator

from sie_broker import Broker, BrokerError, Connection
from sie_contracts.settings import Secret, SettingError
from sie_runtime.process import Stop, retry

_logger = logging.getLogger("sie.broker")


def because(text: str, broker: Connection) -> str:
    """A reason of unreadiness, and what at the broker is its cause."""
    causes = "; ".join(f"{name} cannot be used: {why}" for name, why in sorted(broker.troubles.items()))
    return f"{text}: {causes}" if causes else text


@contextlib.asynccontextmanager
async def connected(
    url: str | None, name: str, stop: Stop, *, password: Secret | None, user: str = ""
) -> AsyncIterator[Broker | None]:
    """The broker at `url`, closed at the end; None if the process is asked to stop before it is connected. Raises
    SettingError if there is no URL.
    """
    from sie_broker.nats import connect

    if url is None:
        raise SettingError("SIE_NATS_URL", f"{name} needs a broker")
    broker: Broker | None = await retry(
        lambda: connect(url, name=name, password=password, user=user),
        errors=(BrokerError,),
        stop=stop,
        logger=_logger,
        what="connecting to the broker",
    )
    try:
        yield broker
    finally:
        if broker is not None:
            await broker.close()
