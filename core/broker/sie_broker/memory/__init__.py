"""The broker inside one process: for `sie serve --standalone`, and the fake of tests.

    StreamServer < Exchange < MemoryServer
    MemoryConnection < MemoryBus < MemoryQueue < MemoryAdministration < MemoryBroker
                     < MemoryStore                                    < MemoryBroker

A `MemoryServer` holds the state, `MemoryServer.connect` makes connections to it. All of it runs on one event loop:
operations take effect before they return, deliveries follow on the next turn of the loop, and time passes through one
timer, armed for the next thing that is due. It behaves as the broker of a cluster does, with refusals and lost
connections; nothing survives the process.
"""

from sie_broker.memory.broker import MemoryBroker, MemoryServer
from sie_broker.memory.streams import matches, overlap

__all__ = ["MemoryBroker", "MemoryServer", "matches", "overlap"]
