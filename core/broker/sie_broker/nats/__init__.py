"""Broker over NATS JetStream.

    NatsConnection < NatsBus < JetStream < NatsQueue < NatsAdministration < NatsBroker
                                         < NatsStore                      < NatsBroker

`A < B`: B inherits from A.

All replies (publish ack, reply to a request, JetStream API) arrive on one inbox of the connection. A token in the
subject of a reply identifies its request. Deliveries arrive on a separate inbox, which `Pulls` replaces after each
reconnect. A pull of the former connection may still be open at the broker, but its inbox no longer exists.

Every request has a time-out. A request in flight fails at once when the connection is lost. A request that starts
without a connection waits for a connection until its time-out. Without a connection, a message that
expects no reply (`send`, `nak`, `in_progress`, `term`, `release`) fails at once. Only an ack waits for the reconnect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sie_broker import Broker
from sie_broker.nats.client import PULL_EXPIRES_S, NatsDelivery
from sie_broker.nats.keyvalue import NatsStore
from sie_broker.nats.queue import NatsAdministration

if TYPE_CHECKING:
    from sie_contracts.settings import Secret

__all__ = ["PULL_EXPIRES_S", "NatsBroker", "NatsDelivery", "connect"]


class NatsBroker(NatsAdministration, NatsStore):
    """Broker over one connection to NATS. Create it with `connect`."""


async def connect(
    url: str, *, name: str, timeout_s: float = 10.0, password: Secret | None = None, user: str = ""
) -> Broker:
    """Connect to `url`; commas separate several servers of a cluster. The server lists the connection as `name`.

    `user` and `password` together replace the credentials in `url`. Without `user`, `password` is added to a user name
    in `url` that has no password. `user` alone has no effect.

    Raises ValueError for an invalid URL, and BrokerUnavailable if no server accepts the connection within the time-out.
    A connection that is lost later is restored, with any number of attempts, one every 0.1 to 1 s. The loss is detected
    at once, or within 15 s if the peer is silent. No log line or error contains the credentials in `url`.
    """
    broker = NatsBroker(name)
    await broker.open(url, timeout_s, password, user)
    return broker
