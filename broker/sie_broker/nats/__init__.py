"""The broker over NATS JetStream.

Every answer (publish ack, reply of a request, JetStream API) comes back on one inbox of the connection and is matched
by its token. Deliveries come back on an inbox of their `Pulls`, made anew after each reconnect, so that a pull of the
old connection, which the broker may still hold, can never be filled beside the one that replaced it. Nothing waits in
silence: what is in flight when the connection is lost fails at once, what is asked for while there is none waits for
the next one until its time-out.
"""

from sie_broker.nats.connection import NatsBroker, connect
from sie_broker.nats.pulls import PULL_EXPIRES_S, NatsDelivery

__all__ = ["PULL_EXPIRES_S", "NatsBroker", "NatsDelivery", "connect"]
