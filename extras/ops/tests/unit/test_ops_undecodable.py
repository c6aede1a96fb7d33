"""Messages and files that no decoder accepts, at the commands of operators."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from undecodable import FAULTS, MARK, check, damages_of, json, msgpack

from sie_broker import CoreMessage
from sie_cli.refusal import CommandRefused
from sie_ops import recovery
from sie_ops.doctor.probe import Heartbeats, ProbeResult

READERS: dict[str, tuple[dict[str, Any], Callable[[Any], bytes], Callable[[bytes], Any]]] = {
    "heartbeat": (
        {"type": "heartbeat/1", "worker": MARK},
        msgpack,
        lambda data: Heartbeats.on_worker(MagicMock(), CoreMessage("subject", data, "reply")),
    ),
    "gateway": (
        {"type": "gateway/1", "gateway": MARK},
        msgpack,
        lambda data: Heartbeats.on_gateway(MagicMock(), CoreMessage("subject", data, "reply")),
    ),
    "health": ({"name": MARK}, json, lambda data: ProbeResult("u", 200, data).decoded(dict)),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("reader", READERS)
def test_doctor_ignores_a_message_that_cannot_be_decoded(reader: str, fault: str) -> None:
    sample, encode, read = READERS[reader]
    check(lambda: read(damages_of(sample, encode)[fault]), None)


@pytest.mark.parametrize("fault", FAULTS)
def test_read_backup_refuses_a_file_that_cannot_be_decoded(fault: str, tmp_path: Path) -> None:
    data = damages_of({"version": MARK}, msgpack)[fault]
    (tmp_path / "backup").write_bytes(recovery.FORMAT + hashlib.sha256(data).hexdigest().encode() + b"\n" + data)
    check(lambda: recovery.read_backup(tmp_path / "backup"), CommandRefused)
