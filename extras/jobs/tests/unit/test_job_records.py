"""Records of jobs and files: all their fields are bounded, because every gateway reads all records."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import inspect
from msgspec.structs import replace

from sie_bulk_jobs.gateway.suspects import MAX_ENDED, MAX_LEFT_OUT, MAX_SUSPECTS, NAME
from sie_bulk_jobs.records import (
    MAX_BROKEN,
    MAX_RECORD_BYTES,
    FileRecord,
    JobRecord,
    ShardRecord,
    Suspect,
    bounded,
    check_request,
    encode,
)
from sie_contracts.api.batches import BatchRequest
from sie_contracts.api.jobs import MAX_REQUEST_BYTES, JobInput, JobRequest
from sie_contracts.errors import ErrorInfo, InvalidInput

WIDE = "\U0001f600"  # four bytes
ANY = {"labels": [WIDE * 100] * 200}
PATTERNS = {r"^[A-Za-z0-9_-]*(?!\n)$": "a" * 128, r"^[1-9][0-9]{0,5}[smhd](?!\n)$": "999999s"}


def largest(kind: inspect.Type, path: str) -> Any:
    """Return the largest value of a type. A type without a bound is an error."""
    match kind:
        case inspect.StrType(pattern=str(pattern)):
            return PATTERNS[pattern]
        case inspect.StrType(max_length=int(most)):
            return WIDE * most
        case inspect.DictType(max_length=int(most)):
            key, value = largest(kind.key_type, path), largest(kind.value_type, path)
            return {f"{number:03}{key}"[: len(key)]: value for number in range(most)}
        case inspect.VarTupleType(max_length=int(most)):
            return [largest(kind.item_type, path)] * most
        case inspect.StructType():
            return {field.encode_name: largest(field.type, f"{path}.{field.name}") for field in kind.fields}
        case inspect.UnionType():
            return max(
                (largest(member, path) for member in kind.types), key=lambda value: len(msgspec.json.encode(value))
            )
        case inspect.LiteralType():
            return max(kind.values, key=len)
        case inspect.IntType():
            return kind.le or 1 << 62
        case inspect.FloatType():
            return kind.le or 1e300
        case inspect.BoolType():
            return True
        case inspect.NoneType():
            return None
        case inspect.DictType(value_type=inspect.AnyType()) if path == "JobRequest.params":
            return ANY  # bounded by the size of the request
    raise AssertionError(f"{path}: nothing bounds {kind}")


@pytest.mark.parametrize("kind", [JobRequest, BatchRequest])
def test_each_field_of_a_client_has_a_bound_and_the_record_of_the_largest_request_is_below_that_of_a_record(
    kind: type[JobRequest] | type[BatchRequest],
) -> None:
    """A request with a field at its bound is accepted, or refused with the name of the field. The largest request has a
    record below the bound, even if its job has failed with the longest messages.
    """
    described = inspect.type_info(kind)
    assert isinstance(described, inspect.StructType)
    small = {"model": "m", "input": {"file": "f"}} if kind is JobRequest else {"input_file_id": "f", "endpoint": "e"}
    accepted = refused = 0
    for field in described.fields:
        value = largest(field.type, f"{kind.__name__}.{field.name}")
        request = msgspec.convert({**small, field.encode_name: value}, kind)
        if len(encode(request)) > MAX_REQUEST_BYTES:
            refused += 1
            with pytest.raises(InvalidInput, match=f"^{field.name}: .*{MAX_REQUEST_BYTES}"):
                check_request(request)
            continue
        accepted += 1
        check_request(request)
        assert len(encode(bounded(failed(request)))) < MAX_RECORD_BYTES
    assert accepted > 0
    assert refused == (2 if kind is JobRequest else 0)  # input and params

    if kind is BatchRequest:
        return
    full = JobRequest(model="m", input=JobInput(file="f"))
    spare = MAX_REQUEST_BYTES - len(encode(replace(full, params={"a": ""})))
    full = replace(full, params={"a": "x" * (spare - 4)})
    check_request(full)
    assert len(encode(full)) > MAX_REQUEST_BYTES - 8
    assert len(encode(bounded(failed(full)))) < MAX_RECORD_BYTES
    with pytest.raises(InvalidInput, match="params"):
        check_request(replace(full, params={"a": "x" * spare}))
    with pytest.raises(InvalidInput, match=r"^params: .*64 bits"):
        check_request(replace(full, params={"a": 1 << 64}))


def failed(request: JobRequest | BatchRequest) -> JobRecord:
    """Return a failed job in which all fields are as large as possible."""
    error = ErrorInfo(WIDE * 1000, WIDE * 100_000, WIDE * 1000, WIDE * 1000, 60, {"errors": ["x" * 100] * 1000})
    return JobRecord(
        f"batch_{'0' * 32}",
        "k" * 64,
        WIDE * 1000,
        1e300,
        state="failed",
        command="cancel",
        model=WIDE * 600,
        lane=".".join(["x" * 63] * 3),
        fingerprint=WIDE * 1000,
        leader="0" * 36,
        suspects=(Suspect(99_999, 99_999, 1, ("0" * NAME,) * MAX_ENDED),) * MAX_SUSPECTS,
        left_out=((99_999, 99_999),) * MAX_LEFT_OUT,
        rows=1 << 62,
        shards=1 << 62,
        codes={f"{number}{WIDE * 1000}": 1 << 62 for number in range(1000)},
        broken=(WIDE * 100_000,) * (2 * MAX_BROKEN),
        error=error,
        trouble=error,
        output_file=f"file-{'0' * 32}",
        error_file=f"file-{'0' * 32}",
        retry_of=f"job-{'0' * 32}",
        **({"request": request} if isinstance(request, JobRequest) else {"batch": request}),
    )


def test_a_shard_and_a_file_have_small_records_too() -> None:
    error = ErrorInfo("C", WIDE * 100_000, extras={"errors": ["x"] * 100_000})
    codes = {f"{number}{WIDE * 1000}": 1 for number in range(1000)}
    shard = ShardRecord(
        "part-000001.parquet", 1, codes=codes, fingerprint=WIDE * 5000, error=error, source="s" * 100_000
    )
    assert len(encode(bounded(shard))) < 16 << 10
    file = FileRecord(f"file-{'0' * 32}", "k" * 64, WIDE * 255, "batch_output", 1 << 62, "0" * 64, 1e300, 1e300)
    assert len(encode(bounded(file))) < 2 << 10
    with pytest.raises(ValueError, match="65536"):
        bounded(replace(file, name="x" * MAX_RECORD_BYTES))


def test_a_record_of_another_version_is_read() -> None:
    """A gateway of before 0.2 counts leaders in `lost`, which later ones do not read; it does not read `suspects`."""
    record = JobRecord("job-1", "k", "key", 1.0, suspects=(Suspect(0, 5, 1, ("g1",)),), is_alone=True, done=7)
    fields = msgspec.msgpack.decode(encode(record))
    earlier = {name: value for name, value in fields.items() if name not in ("suspects", "is_alone")}
    read = msgspec.msgpack.decode(encode({**earlier, "lost": ["g1"], "peak_done": 7}), type=JobRecord)
    assert read == replace(record, suspects=(), is_alone=False)
    assert msgspec.msgpack.decode(encode(record), type=JobRecord) == record
