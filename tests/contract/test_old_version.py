"""Gateways, workers and config services of the version that an upgrade starts from, by its own code: what it wrote is
still here, and it reads what is written today.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from contract.old_reader import Read
from message_examples import EXAMPLES, FIXTURES, encoded, newer_bytes, path_of
from upgrade import released

from sie_contracts.wire import ipc

READER = Path(__file__).with_name("old_reader.py")
# between sidecar and adapter of one pod, which change together
OTHER_PROTOCOL = re.compile(rf"ipc(?!{ipc.PROTOCOL}-)\d+-")
MESSAGES = [name for name in EXAMPLES if not name.startswith("ipc")]
if reason := released.absent():
    pytest.skip(reason, allow_module_level=True)


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Read]:
    """What the old version reads of each example: what was written once, what is written today, and what a later
    version may write.
    """
    folder = tmp_path_factory.mktemp("old")
    released.extract(folder, "contracts", "catalog")
    asked = {name: [path_of(name).read_bytes(), encoded(name), newer_bytes(name)] for name in MESSAGES}
    done = subprocess.run(
        [sys.executable, str(READER)],
        input=msgspec.msgpack.encode(asked),
        env={**os.environ, "PYTHONPATH": str(folder / "contracts")},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return msgspec.msgpack.decode(done.stdout, type=dict[str, Read])


def test_no_fixture_of_the_old_version_is_missing_or_changed() -> None:
    """P2."""
    written = released.files_under("tests/contract/fixtures")
    assert len(written) > 50
    kept = {name: data for name, data in written.items() if not OTHER_PROTOCOL.match(name)}
    assert {name: (FIXTURES / name).read_bytes() for name in kept if (FIXTURES / name).exists()} == kept


@pytest.mark.parametrize("name", MESSAGES)
def test_the_old_version_reads_what_is_written_today(name: str, old: dict[str, Read]) -> None:
    """P2: with the same values, and also when the sender knows more than today."""
    assert [value for value in old[name].values if not agrees(value, EXAMPLES[name])] == []


def agrees(read: Any, written: Any) -> bool:
    """Whether all that the old version knows is what was written."""
    if isinstance(written, msgspec.Struct):
        if isinstance(read, str):  # the text of an error
            return False
        tag, fields = read
        same_kind = tag == written.__struct_config__.tag
        return same_kind and all(agrees(value, getattr(written, name)) for name, value in fields.items())
    if isinstance(written, tuple):
        return len(read) == len(written) and all(map(agrees, read, written))
    if isinstance(written, dict):
        return read.keys() == written.keys() and all(agrees(value, written[key]) for key, value in read.items())
    return bool(read == written)


def test_the_old_version_knows_most_messages(old: dict[str, Read]) -> None:
    known = {type(EXAMPLES[name]) for name in MESSAGES if old[name].values}
    assert len(known) >= 0.8 * len({type(EXAMPLES[name]) for name in MESSAGES})


@pytest.mark.parametrize("name", MESSAGES)
def test_a_field_was_only_ever_added_and_has_a_default(name: str, old: dict[str, Read]) -> None:
    """P2: nothing is renamed, nothing that was optional is demanded."""
    today = {field.name: field.required for field in msgspec.structs.fields(type(EXAMPLES[name]))}
    before = old[name].required or today
    assert before.keys() <= today.keys()
    assert not any(required and not before.get(field, False) for field, required in today.items())
