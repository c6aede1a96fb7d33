"""Batches in OpenAI's form: each line of a file is one request, each line of the output its answer.

    line ──► route of its url ──► Inference.answered, bulk ──► {"custom_id", "response", "error"}
    parts ──at the end──► a file of answers, a file of failures

Source: the OpenAI API reference, section Batch: the objects "request input" and "request output".
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import orjson

from sie_contracts.errors import ErrorInfo, InvalidInput, NotFound, SIEError
from sie_contracts.jobs import FileRecord, JobRecord, Plan, ShardRecord, Span
from sie_gateway.call import Answer, Call, FailedRequest
from sie_gateway.jobs.asking import Asking, Halted
from sie_gateway.jobs.run import Progress, ShardBroken
from sie_gateway.jobs.workplace import Workplace
from sie_runtime.http import uuid7

if TYPE_CHECKING:
    from sie_gateway.route_kinds import InferenceRoute

SHARD_LINES = 1000
MAX_LINES = 50_000  # OpenAI's own limit
MAX_LINE_BYTES = 64 << 20
_NATIVE = ("/v1/encode", "/v1/score", "/v1/extract")  # whose model is in the path


class Lines:
    """The work of one batch. `route_of` finds the route that answers POST of a path."""

    def __init__(
        self,
        workplace: Workplace,
        job: JobRecord,
        asking: Asking,
        progress: Progress,
        route_of: Callable[[str], InferenceRoute | None],
    ) -> None:
        assert job.batch is not None
        self._place = workplace
        self._job = job
        self._batch = job.batch
        self._asking = asking
        self._progress = progress
        self._route_of = route_of
        self._repeated: frozenset[int] = frozenset()  # lines with the custom_id of a line before

    async def plan(self) -> Plan:
        """See Work. Raises InvalidInput for a file without lines, or with too many."""
        made = await self._place.plan() or await self._planned()
        self._repeated = frozenset(made.repeated)
        return made

    async def _planned(self) -> Plan:
        cut = _Cut(self._batch.input_file_id)
        async for piece in await self._place.files.open(await self._input()):
            cut.feed(piece)
        return await self._place.keep_plan(cut.plan())

    async def shard(self, number: int, span: Span) -> ShardRecord:
        """See Work."""
        name = self._place.part(number, "jsonl")
        data = await self._place.existing(name)
        if data is None:
            try:
                text = await self._place.files.range(await self._input(), span.start, span.end)
            except NotFound as error:
                raise ShardBroken(
                    ErrorInfo(error.code, "the input file is not there any more", "input_missing")
                ) from error
            lines = text.split(b"\n")
            if not lines[-1]:
                lines.pop()
            try:
                async with asyncio.TaskGroup() as tasks:
                    answers = [
                        tasks.create_task(self._line(number, span.first + place, line.strip()))
                        for place, line in enumerate(lines)
                    ]
            except* (SIEError, Halted) as errors:
                raise errors.exceptions[0] from errors
            data = await self._place.put_once(name, b"".join(each.result() + b"\n" for each in answers))
        answered = [orjson.loads(line) for line in data.splitlines()]
        codes: dict[str, int] = {}
        for each in answered:
            if (code := _code(each)) is not None:
                codes[code] = codes.get(code, 0) + 1
        return ShardRecord(
            name,
            len(answered),
            len(data),
            hashlib.sha256(data).hexdigest(),
            failed=sum(codes.values()),
            codes=codes,
            tokens=sum(_tokens(each) for each in answered),
            source=f"{span.source}:{span.first + 1}",
        )

    async def finish(self, state: str, shards: dict[int, ShardRecord]) -> dict[str, Any]:
        """See Work: the parts become two files. An empty one is not made."""
        plan = await self._place.plan()
        spans = plan.spans if plan is not None else ()
        counts = sum(shard.rows - shard.failed for shard in shards.values() if shard.error is None)
        failed = sum(shard.failed + (shard.error is not None) for shard in shards.values())
        lost = state == "expired" and len(shards) < len(spans)
        fields: dict[str, Any] = {}
        if counts:
            fields["output_file"] = await self._file("output", self._lines(shards, spans, False, failures=False))
        if failed or lost:
            fields["error_file"] = await self._file("errors", self._lines(shards, spans, lost, failures=True))
        return fields

    async def close(self) -> None:
        """See Work: nothing is open."""

    async def _lines(
        self, shards: dict[int, ShardRecord], spans: tuple[Span, ...], lost: bool, *, failures: bool
    ) -> AsyncIterator[bytes]:
        """The answers, or the failures, in the order of their requests."""
        for number, span in enumerate(spans):
            shard = shards.get(number)
            if shard is not None and shard.error is not None:
                if failures:
                    yield _failure(None, shard.error.reason, f"{shard.rows} requests: {shard.error.message}") + b"\n"
            elif shard is not None and (shard.failed if failures else shard.rows - shard.failed):
                data = await self._place.existing(shard.name) or b""
                wanted = [line for line in data.splitlines() if (_code(orjson.loads(line)) is not None) == failures]
                yield b"".join(line + b"\n" for line in wanted)
            elif shard is None and lost:
                text = await self._place.files.range(await self._input(), span.start, span.end)
                yield b"".join(
                    _failure(_custom_id(line), "batch_expired", "the batch expired before this request ran") + b"\n"
                    for line in text.splitlines()
                    if line.strip()
                )

    async def _input(self) -> FileRecord:
        return await self._place.files.find(self._batch.input_file_id, self._job.owner, sees_all=True)

    async def _file(self, kind: str, data: AsyncIterator[bytes]) -> str:
        # the same for every leader that comes this far, and grows with time as all ids of files do
        rest = uuid.uuid5(uuid.NAMESPACE_OID, f"{self._job.id} {kind}").hex[12:]
        file_id = f"file-{int(self._job.finalizing_s * 1000):012x}{rest}"
        name = f"{self._job.id}_{kind}.jsonl"
        record = await self._place.files.create(self._job.owner, name, "batch_output", data, file=file_id)
        return record.id

    async def _line(self, shard: int, number: int, line: bytes) -> bytes:
        custom_id: str | None = None
        try:
            custom_id, path, body = self._read(line, number)
            route = self._route_of(path)
            if route is None:
                raise _Bad("invalid_url", f"line {number + 1}: url: this server has no such route for batches")
            answer = await self._answered(custom_id, route, path, body)
        except _Bad as error:
            answer = _failure(custom_id or _custom_id(line), error.code, error.message)
        self._progress.rows(shard, 1, int(_code(orjson.loads(answer)) is not None))
        return answer

    def _read(self, line: bytes, number: int) -> tuple[str, str, bytes]:
        """What a line asks for: its custom_id, the path of its route, and the body. Raises _Bad."""
        where = f"line {number + 1}"
        try:
            asked = orjson.loads(line)
        except orjson.JSONDecodeError:
            raise _Bad("invalid_json_line", f"{where}: no JSON") from None
        if not isinstance(asked, dict):
            raise _Bad("invalid_json_line", f"{where}: expected a map with custom_id, method, url and body")
        custom_id, url, body = asked.get("custom_id"), asked.get("url"), asked.get("body")
        if not isinstance(custom_id, str) or not custom_id:
            raise _Bad("missing_required_parameter", f"{where}: custom_id: expected a string")
        if number in self._repeated:
            raise _Bad("duplicate_custom_id", f"{where}: custom_id: another line before has the same")
        if asked.get("method", "POST") != "POST":
            raise _Bad("invalid_method", f"{where}: method: expected POST")
        endpoint = self._batch.endpoint
        if not isinstance(url, str) or not (url == endpoint or url.startswith(f"{endpoint}/")):
            raise _Bad("mismatched_url", f"{where}: url: expected {endpoint}, as the batch has it")
        if not isinstance(body, dict):
            raise _Bad("missing_required_parameter", f"{where}: body: expected a map")
        if url in _NATIVE:
            model = body.get("model")
            if not isinstance(model, str) or not model:
                raise _Bad("missing_required_parameter", f"{where}: body.model: expected the name of a model")
            url = f"{url}/{model}"
        return custom_id, url, orjson.dumps(body)

    async def _answered(self, custom_id: str, route: InferenceRoute, path: str, body: bytes) -> bytes:
        calls: list[Call] = []

        async def attempt() -> Answer:
            call = self._asking.call()
            calls.append(call)
            call.path, call.model = path, route_model(route, path)
            call.labels["endpoint"] = route.endpoint
            try:
                return await self._asking.inference.answered(call, route, body)
            finally:
                call.charge.refund()

        await self._asking.room.enter(1)
        began_s = asyncio.get_running_loop().time()
        try:
            await self._asking.throttle.wait()
            answer = await self._asking.patiently(attempt)
        except (SIEError, FailedRequest) as error:
            call = calls[-1]
            cause, errors = (error.error, error.errors) if isinstance(error, FailedRequest) else (error, None)
            status, told = call.shape(cause, call.id, errors)
            return _line(custom_id, call.id, status, orjson.dumps(told))
        finally:
            await self._asking.room.leave(1, asyncio.get_running_loop().time() - began_s)
        text = answer.body if isinstance(answer.body, bytes) else b"".join(answer.body)
        return _line(custom_id, calls[-1].id, answer.status, text)


class _Cut:
    """Cuts a file into spans of lines, as its bytes pass, and finds lines with a custom_id of a line before."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._spans: list[Span] = []
        self._rest = b""  # of a line that is not complete
        self._lines = self._first = 0
        self._start = self._end = 0  # bytes: of the span, and of the last complete line
        self._seen: set[str] = set()
        self._repeated: list[int] = []

    def feed(self, piece: bytes) -> None:
        """Raises InvalidInput."""
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            self._line(line, 1)
        if len(self._rest) > MAX_LINE_BYTES:
            message = f"input_file_id: line {self._lines + 1} has more than {MAX_LINE_BYTES} bytes"
            raise InvalidInput(message, reason="too_large", param="input_file_id")

    def _line(self, line: bytes, newline: int) -> None:
        self._lines += 1
        self._end += len(line) + newline
        custom_id = _custom_id(line)
        if custom_id is not None and custom_id in self._seen:
            self._repeated.append(self._lines - 1)
        elif custom_id is not None:
            self._seen.add(custom_id)
        if self._lines > MAX_LINES:
            message = (
                f"input_file_id: more than {MAX_LINES} lines, which a batch may have; POST /v1/jobs takes any number"
            )
            raise InvalidInput(message, reason="too_many_items", param="input_file_id")
        if self._lines - self._first == SHARD_LINES:
            self._cut()

    def _cut(self) -> None:
        rows = self._lines - self._first
        self._spans.append(Span(self._file, "jsonl", self._first, rows, self._start, self._end))
        self._first, self._start = self._lines, self._end

    def plan(self) -> Plan:
        """Raises InvalidInput for a file without lines."""
        if self._rest:  # the last line has no newline
            self._line(self._rest, 0)
        if self._lines > self._first:
            self._cut()
        if not self._lines:
            raise InvalidInput("input_file_id: the file has no lines", reason="empty_file", param="input_file_id")
        return Plan(tuple(self._spans), repeated=tuple(self._repeated))


class _Bad(Exception):
    """A line that is no request."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


def route_model(route: InferenceRoute, path: str) -> str | None:
    """The model that a path names, None where the body names it."""
    head, placeholder, _ = route.path.partition("{model:path}")
    return path[len(head) :] if placeholder else None


def _line(custom_id: str, request_id: str, status: int, body: bytes) -> bytes:
    """An answer as a line: `body` is JSON already."""
    head = orjson.dumps({"id": f"batch_req_{uuid7().replace('-', '')}", "custom_id": custom_id})
    told = orjson.dumps({"status_code": status, "request_id": request_id})
    return head[:-1] + b',"response":' + told[:-1] + b',"body":' + body + b'},"error":null}'


def _failure(custom_id: str | None, code: str, message: str) -> bytes:
    """A request that was never sent, as a line."""
    told = {"custom_id": custom_id, "response": None, "error": {"code": code, "message": message}}
    return orjson.dumps({"id": f"batch_req_{uuid7().replace('-', '')}", **told})


def _custom_id(line: bytes) -> str | None:
    try:
        asked = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    found = asked.get("custom_id") if isinstance(asked, dict) else None
    return found if isinstance(found, str) else None


def _code(answered: dict[str, Any]) -> str | None:
    """The code of a line's error; None for an answer."""
    if answered["error"] is not None:
        return str(answered["error"]["code"])
    response = answered["response"]
    if response["status_code"] < 400:
        return None
    error = response["body"].get("error", response["body"]) if isinstance(response["body"], dict) else {}
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, str) and code else f"HTTP_{response['status_code']}"


def _tokens(answered: dict[str, Any]) -> int:
    body = (answered["response"] or {}).get("body")
    usage = body.get("usage") if isinstance(body, dict) else None
    tokens = usage.get("total_tokens") if isinstance(usage, dict) else None
    return tokens if isinstance(tokens, int) else 0
