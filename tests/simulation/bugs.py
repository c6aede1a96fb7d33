"""Bugs that tests plant, each a small change of one function, to show that the simulation finds them.

`seeds`: one of so many seeds, from 0 on, finds the bug.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest import mock

import msgspec
from simulation.network import Connection

import sie_gateway.inference.answers
import sie_gateway.inference.results
import sie_sidecar.batch
import sie_sidecar.dispatch
import sie_sidecar.in_flight
import sie_sidecar.models
import sie_sidecar.prepare.fetching
import sie_sidecar.process
import sie_sidecar.settle
from sie_broker import BrokerError
from sie_contracts.settings import BY_NAME
from sie_contracts.wire import messages


class Bug(NamedTuple):
    plant: Callable[[], AbstractContextManager[Any]]
    seeds: int
    finds: str  # a part of the violation
    long: bool = False  # only the long lane runs it, because it takes long


def _around(
    owner: Any, name: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> AbstractContextManager[Any]:
    return mock.patch.object(owner, name, change(getattr(owner, name)))


def _acked_before_confirmed() -> AbstractContextManager[Any]:
    async def answer(self: Any, lease: Any, item: Any, result: Any, *_: Any, **__: Any) -> None:
        await self.leases.finish(lease)
        with contextlib.suppress(BrokerError):
            await self._bus.request(item.reply, messages.encode(result), 2.0)

    return mock.patch.object(sie_sidecar.settle.ResultDelivery, "send", answer)


def _no_fence() -> AbstractContextManager[Any]:
    return mock.patch.object(sie_sidecar.settle.Leases, "left_s", return_value=60.0)


def _never_renewed() -> AbstractContextManager[Any]:
    async def renew_all(self: Any) -> None:
        """Do nothing."""

    return mock.patch.object(sie_sidecar.settle.Leases, "renew_all", renew_all)


def _another_chunk() -> AbstractContextManager[Any]:
    """Take each result for that of the next missing chunk."""

    def change(offer: Any) -> Any:
        def offered(self: Any, result: Any) -> Any:
            free = next((place for place, have in enumerate(self.results) if have is None), result.chunk)
            return offer(self, msgspec.structs.replace(result, chunk=free))

        return offered

    return _around(sie_gateway.inference.results.OutcomeCollector, "offer", change)


def _new_message_id() -> AbstractContextManager[Any]:
    """Give each try of a publish its own message id."""
    numbers = itertools.count()

    def change(publish: Any) -> Any:
        async def published(self: Any, subject: str, data: bytes, message_id: str, *more: Any, **named: Any) -> Any:
            return await publish(self, subject, data, f"{message_id}.{next(numbers)}", *more, **named)

        return published

    return _around(Connection, "publish", change)


def _limits(**changed: Callable[[Any], Any]) -> Callable[[], AbstractContextManager[Any]]:
    """Return a plant by which the scheduler works with other limits than those of its settings."""

    def change(limits_of: Any) -> Any:
        def limits(*args: Any) -> Any:
            bounds = limits_of(*args)
            return dataclasses.replace(bounds, **{name: of(getattr(bounds, name)) for name, of in changed.items()})

        return limits

    return lambda: _around(sie_sidecar.process, "limits_of", change)


def _together() -> AbstractContextManager[Any]:
    """Run the inputs of a batch that ended an adapter with others again."""

    def change(on_gone: Any) -> Any:
        return lambda self, flights, *, suspects: on_gone(self, flights, suspects=False)

    return _around(sie_sidecar.dispatch.Dispatch, "_on_gone", change)


def _slots_reversed() -> AbstractContextManager[Any]:
    def change(add_results: Any) -> Any:
        def added(self: Any, indices: Any, *more: Any) -> Any:
            return add_results(self, list(reversed(indices)), *more)

        return added

    return _around(sie_gateway.inference.results.RequestResult, "add_results", change)


def _permit_leaked() -> AbstractContextManager[Any]:
    """Never give back the permit of a batch that was lost with its adapter."""

    def change(on_gone: Any) -> Any:
        def gone(self: Any, *args: Any, **more: Any) -> Any:
            self._device.sent += 1
            return on_gone(self, *args, **more)

        return gone

    return _around(sie_sidecar.dispatch.Dispatch, "_on_gone", change)


def _loras_mixed() -> AbstractContextManager[Any]:
    def change(add: Any) -> Any:
        def mixed(self: Any, flight: Any, **more: Any) -> Any:
            flight.key = flight.key._replace(lora="")
            return add(self, flight, **more)

        return mixed

    return _around(sie_sidecar.batch.Waiting, "add", change)


def _cached_loras_mixed() -> AbstractContextManager[Any]:
    def change(space_of: Any) -> Any:
        return lambda owner, signed, operation, run: space_of("", "", operation, msgspec.structs.replace(run, lora=""))

    return _around(sie_gateway.inference.answers, "space_of", change)


def _collector_kept() -> AbstractContextManager[Any]:
    return mock.patch.object(sie_gateway.inference.results.ResultInbox, "close", return_value=None)


def _deadline_ignored() -> AbstractContextManager[Any]:
    def change(wait: Any) -> Any:
        async def waited(self: Any, timeout_s: float) -> Any:
            return await wait(self, timeout_s + 5.0)

        return waited

    return _around(sie_gateway.inference.results.OutcomeCollector, "wait", change)


def _held_cost_kept() -> AbstractContextManager[Any]:
    """Count an item that waits no longer as one token."""

    def change(count: Any) -> Any:
        return lambda self, held, cost: count(self, held, cost or 1)

    return _around(sie_sidecar.in_flight.Inventory, "count", change)


def _outdated() -> AbstractContextManager[Any]:
    """Run work on whatever entry of its model is loaded."""
    return mock.patch.object(sie_sidecar.in_flight.InFlight, "is_outdated", new=False)


def _payloads_kept() -> AbstractContextManager[Any]:
    return mock.patch.object(sie_sidecar.prepare.fetching.PayloadFetching, "let_go", return_value=None)


def _never_unloaded() -> AbstractContextManager[Any]:
    async def unload_when_idle(self: Any, hosted: Any) -> bool:
        return False

    return mock.patch.object(sie_sidecar.models.Hosting, "unload_when_idle", unload_when_idle)


def _load_tried_once() -> AbstractContextManager[Any]:
    """Give up work whose model does not fit on the first device that tries to load it."""

    def change(obtain: Any) -> Any:
        def obtained(self: Any, resolved: Any, *args: Any) -> Any:
            failed = [hosted for hosted in self.find(resolved.residency) if hosted.state == "failed"]
            return failed[0] if failed else obtain(self, resolved, *args)

        return obtained

    return _around(sie_sidecar.models.WorkerModels, "obtain", change)


BUGS: dict[str, Bug] = {
    "the message is acked before its result is confirmed": Bug(_acked_before_confirmed, 40, "GATEWAY_TIMEOUT"),
    "a late error is not fenced": Bug(_no_fence, 42, "sent an error", long=True),
    "leases are not renewed": Bug(_never_renewed, 20, "was delivered again", long=True),
    "a result of another chunk is accepted": Bug(_another_chunk, 10, "not the vector", long=True),
    "a publish is repeated under a new message id": Bug(_new_message_id, 40, "in the stream twice", long=True),
    "the cost budget of a batch is ignored": Bug(_limits(cost=lambda cost: 4 * cost), 10, "the budget is", long=True),
    "a batch has too many work items": Bug(
        _limits(requests=lambda requests: 4 * requests), 10, "the limit is", long=True
    ),
    "bulk work is overtaken without end": Bug(
        _limits(bulk_max_overtakes=lambda most: 10**6), 20, "was overtaken", long=True
    ),
    "work waits before an idle device": Bug(_limits(wait_s=lambda wait_s: wait_s + 1.0), 40, "before an idle device"),
    "suspects run with others": Bug(_together, 40, "ended an adapter, and others", long=True),
    "slots are in the wrong order": Bug(_slots_reversed, 5, "not the vector", long=True),
    "the permit of a lost batch is kept": Bug(_permit_leaked, 40, "", long=True),
    "LoRAs share a batch": Bug(_loras_mixed, 10, "not the vector", long=True),
    "LoRAs share cached answers": Bug(_cached_loras_mixed, 10, "not the vector"),
    "a collector stays open": Bug(_collector_kept, 3, "open collectors"),
    "the gateway waits past the deadline": Bug(_deadline_ignored, 20, "was open for", long=True),
    "held cost is not given back": Bug(_held_cost_kept, 3, "held cost", long=True),
    "work of an earlier entry runs": Bug(_outdated, 10, "was served by"),
    "the memory of payloads is kept": Bug(_payloads_kept, 20, "bytes of payloads", long=True),
    "an operator's unload is ignored": Bug(_never_unloaded, 5, "the operator's unload", long=True),
    "a load is tried on one device": Bug(_load_tried_once, 60, "MODEL_LOAD_FAILED", long=True),
}


if "SIE_CACHE_BYTES" not in BY_NAME:
    del BUGS["LoRAs share cached answers"]


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    with BUGS[name].plant():
        yield
