"""Results of evaluations that no decoder accepts are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from undecodable import FAULTS, MARK, check, damages_of, json, of_file

from sie_cli.refusal import CommandRefused
from sie_evals import results


@pytest.mark.parametrize("fault", FAULTS)
def test_read_refuses_a_result_that_cannot_be_decoded(fault: str, tmp_path: Path) -> None:
    data = damages_of({"model": MARK}, json)[fault]
    check(lambda: of_file(results.read, "a.json")(data, tmp_path), CommandRefused)
