"""Answers of databases that no decoder accepts."""

from __future__ import annotations

import pytest
from undecodable import FAULTS, MARK, check, damages_of, json

from sie_bulk_jobs.sinks import qdrant


@pytest.mark.parametrize("fault", FAULTS)
def test_an_answer_of_qdrant_that_cannot_be_decoded_is_refused(fault: str) -> None:
    check(lambda: qdrant._reply(damages_of({"result": MARK}, json)[fault]), qdrant.SinkUnsuitable)
