"""Broker inside one process: for `sie serve --standalone`, and as a fake for tests.

    StreamServer < Exchange < MemoryServer
    MemoryConnection < MemoryBus < MemoryQueue < MemoryAdministration < MemoryBroker
                     < MemoryStore                                    < MemoryBroker

`A < B`: B inherits from A. A `MemoryServer` has the state; `MemoryServer.connect` creates a connection to the server.
All code runs on one event loop. An operation has its effect before it returns. Deliveries follow on the next iteration
of the loop. One timer ends leases, delivers delayed messages and removes old messages. The server behaves like the
broker of a cluster, including refusals and lost connections. Its state is lost when the process ends.
"""

from sie_broker.memory.broker import MemoryBroker, MemoryServer
from sie_broker.memory.streams import matches, overlap

__all__ = ["MemoryBroker", "MemoryServer", "matches", "overlap"]
