"""The broker inside one process: the queue of `sie serve --standalone`, and the fake of tests.

A `MemoryServer` holds the state, `MemoryServer.connect` makes connections to it. All of it runs on one event loop:
operations take effect before they return, deliveries follow on the next turn of the loop, and time passes through one
timer, armed for the earliest thing due. It promises what the broker in the cluster promises, refusals and lost
connections included; nothing survives the process.
"""

from sie_broker.memory.connection import MemoryBroker
from sie_broker.memory.server import MemoryServer
from sie_broker.memory.stream import matches, overlap

__all__ = ["MemoryBroker", "MemoryServer", "matches", "overlap"]
