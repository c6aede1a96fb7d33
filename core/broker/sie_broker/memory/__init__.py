"""The broker inside one process: for `sie serve --standalone`, and as a fake for tests.

    StreamServer < Exchange < MemoryServer
    MemoryConnection < MemoryBus < MemoryQueue < MemoryAdministration < MemoryBroker
                     < MemoryStore                                    < MemoryBroker

A `MemoryServer` holds the state; `MemoryServer.connect` makes connections to it. All code runs on one event loop. An
operation takes effect before it returns. Deliveries follow on the next turn of the loop. One timer, armed for the next
event that is due, drives everything that depends on time. The server behaves as the broker of a cluster does, with
refusals and lost connections. Its state does not survive the process.
"""

from sie_broker.memory.broker import MemoryBroker, MemoryServer
from sie_broker.memory.streams import matches, overlap

__all__ = ["MemoryBroker", "MemoryServer", "matches", "overlap"]
