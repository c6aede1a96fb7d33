"""Handlers of messages: an unavailable broker is one line of the log, a fault is logged with its traceback."""

from __future__ import annotations

import logging

import pytest

from sie_broker import BrokerError, BrokerUnavailable, NoResponder
from sie_broker.tasks import guarded


@pytest.mark.parametrize("error", [BrokerUnavailable("connection lost"), NoResponder("gone"), BrokerError("refused")])
async def test_a_handler_whose_broker_is_away_logs_one_warning(
    error: BrokerError, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler() -> None:
        raise error

    await guarded("the handler of sie.result.x", handler())
    (record,) = caplog.records
    assert (record.levelno, record.exc_info) == (logging.WARNING, None)
    assert record.getMessage() == f"the handler of sie.result.x was not completed, because the broker failed: {error}"


async def test_a_fault_of_a_handler_has_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async def handler() -> None:
        raise ValueError("a fault")

    await guarded("the handler of sie.result.x", handler())
    (record,) = caplog.records
    assert (record.levelno, record.exc_info is not None) == (logging.ERROR, True)
