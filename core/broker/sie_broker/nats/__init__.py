"""Broker over NATS JetStream.

    NatsConnection < NatsBus < JetStream < NatsQueue < NatsAdministration < NatsBroker
                                         < NatsStore                      < NatsBroker

`A < B`: B inherits from A.

Every answer (publish ack, reply of a request, JetStream API) arrives on one inbox of the connection and is matched by
its token. Deliveries arrive on an inbox of their `Pulls`, which gets a new inbox after each reconnect. So a pull of the
former connection, which may still be open at the broker, cannot be filled in addition to the pull that replaced it.

Every request has a time-out. A request in flight fails at once when the connection is lost. A request that starts
without a connection waits for the next one until its time-out. A message without an answer (`send`, `nak`,
`in_progress`, `term`, `release`) fails at once without a connection; only an ack is sent after the reconnect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sie_broker import Broker
from sie_broker.nats.jetstream import PULL_EXPIRES_S, NatsDelivery
from sie_broker.nats.keyvalue import NatsStore
from sie_broker.nats.queue import NatsAdministration

if TYPE_CHECKING:
    from sie_contracts.settings import Secret

__all__ = ["PULL_EXPIRES_S", "NatsBroker", "NatsDelivery", "connect"]


class NatsBroker(NatsAdministration, NatsStore):
    """Broker over NATS: all protocols over one connection. `connect` creates it."""


async def connect(
    url: str, *, name: str, timeout_s: float = 10.0, password: Secret | None = None, user: str = ""
) -> Broker:
    """Connect to `url`; several servers of a cluster are separated by commas. The server lists the connection as
    `name`.

    `user` and `password` together replace the credentials in `url`. `password` alone belongs to the user in `url`, if
    `url` has a user without a password. `user` alone has no effect.

    Raises ValueError for an invalid URL, and BrokerUnavailable if no server accepts within the time-out. Later, a lost
    connection is restored without a limit of attempts, one every 0.1 to 1 s. The loss is detected at once, or within
    15 s if the peer is silent. No log line or error contains the credentials in `url`.
    """
    broker = NatsBroker(name)
    await broker.open(url, timeout_s, password, user)
    return broker
