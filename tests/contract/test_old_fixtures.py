"""The fixtures of the version that an upgrade starts from are all still here, byte for byte: test_messages.py reads
what it wrote.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from upgrade import released

from sie_contracts import ipc

FIXTURES = Path(__file__).parent / "fixtures"
# between sidecar and adapter of one pod, which change together
OTHER_PROTOCOL = re.compile(rf"ipc(?!{ipc.PROTOCOL}-)\d+-")


def test_no_fixture_of_the_old_version_is_missing_or_changed() -> None:
    """P2."""
    if reason := released.absent():
        pytest.skip(reason)
    old = released.files_under("tests/contract/fixtures")
    assert len(old) > 50
    kept = {name: data for name, data in old.items() if not OTHER_PROTOCOL.match(name)}
    assert {name: (FIXTURES / name).read_bytes() for name in kept if (FIXTURES / name).exists()} == kept
