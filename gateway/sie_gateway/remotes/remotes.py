"""Remote servers for requests that this cluster refuses for lack of capacity. Only proven servers get requests.

    every second ──► probe due? ──► reference vectors ──► vectors of the server ──► close enough: proven for a day, or
                                       │                     │                      for an hour by golden vectors
                                       └ none: not proven    └ no reply, or too different: not proven
    a refused request ──► may it leave, and is a server proven? ──► budget ──► the remote server ──► checked vectors
                          └ no: client gets the refusal                        └ no reply: client gets the refusal

A remote server gets requests only while it has a proof. After two failed calls in a row, or a reply that names another
model, the server loses its proof until it passes a probe. Probes run in the background, not during a request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sie_broker import BrokerError, Entry, Store, Write
from sie_broker.record import Record, RecordBucket
from sie_contracts.api.views import ClusterFinding
from sie_contracts.errors import UNDECODABLE, SIEError
from sie_contracts.models.catalogue import Resolved
from sie_contracts.models.entries import ModelEntry
from sie_contracts.settings import Secret, SettingError, Settings, secret_variable
from sie_contracts.wire import messages, records
from sie_contracts.wire.heartbeats import ModelStatus
from sie_contracts.wire.messages import ArraySlice, Ok, Stages, WorkResult, utf8_bytes
from sie_contracts.wire.records import RemoteReference
from sie_contracts.wire.topology import REMOTES_BUCKET, model_token
from sie_gateway.admission.grant import Grant
from sie_gateway.fleet.lanes import Fleet
from sie_gateway.inference.body import RequestItem
from sie_gateway.inference.call import Call, EntryChanged, InferRequest
from sie_gateway.inference.chunk import Chunk, estimated_tokens
from sie_gateway.inference.reply import array_of
from sie_gateway.inference.results import FailedRequest, PlannedRequest, RequestResult
from sie_gateway.metrics import Metrics
from sie_gateway.remotes import proof as proofs
from sie_gateway.remotes.budget import BudgetUsed, MonthlyBudget, Stored
from sie_gateway.remotes.client import RemoteClient, RemoteFailed, Vectors
from sie_gateway.remotes.configuration import SETTING, RemoteServer
from sie_gateway.remotes.proof import Deviates, Prompt, Proof, Reference
from sie_runtime.feed import CatalogueFeed
from sie_runtime.http.asgi import uuid7
from sie_runtime.process import Stop, Trouble

# codes of the errors with which this cluster refuses a request for lack of capacity
REFUSALS = frozenset({"PROVISIONING", "MODEL_LOADING", "QUEUE_FULL", "QUEUE_UNAVAILABLE"})
MAX_FAILURES = 2
CHECK_S = 1.0
PROVEN_S = 86_400.0  # seconds from a proof by a worker's vectors to the next probe
# seconds from a failed probe to the next probe; the pause doubles with each failed probe, up to MAX_PAUSE_S
FIRST_PAUSE_S, MAX_PAUSE_S = 2.0, 300.0
DEVIATES_S = 3600.0  # seconds to the next probe after a probe in which the server's vectors deviate
# shortest time in seconds from a probe to the next one, if a failed or wrong reply to a request causes the next probe
AGAIN_S = 60.0
# largest number of stored model names of a server; replicas behind its address may report different names
MAX_MODELS = 16
# seconds from a proof by golden vectors to the next probe: golden vectors prove less than vectors of a worker
GOLDEN_S = 3600.0
BUDGET_S = 30.0  # seconds in which a worker must compute reference vectors
BROKER_S = 2.0
MIN_LEFT_S = 0.05
# largest size of a request's texts in bytes, because encoding the texts as JSON blocks the event loop
MAX_BYTES = 4 << 20
KEY = "_remote"  # name of the API key of requests for reference vectors
MAYBE_TRUNCATED = (
    "truncated_items: a remote server answered, and it does not report truncated texts: long texts may be truncated"
)
UNTESTED = "it has not been probed yet"
_PINNED = ("x-sie-remote", "x-sie-pool", "x-sie-machine-profile")
_logger = logging.getLogger("sie.gateway.remotes")


class NoReference(Exception):
    """Raised if there are no reference vectors to compare with the vectors of a remote server."""


class Remote:
    """One remote server: its proof, or the reason why it gets no requests."""

    def __init__(self, server: RemoteServer, client: RemoteClient, budget: MonthlyBudget) -> None:
        self.server = server
        self.client = client
        self.budget = budget
        self.proof: Proof | None = None
        self.reason = UNTESTED
        self.failures = 0  # number of failed calls in a row
        self.due_s = 0.0
        self.probed_s = -AGAIN_S  # time of the last probe
        self.models: set[str] = set()  # model names that the server reported in proofs for the same catalogue entry
        self.pause_s = FIRST_PAUSE_S
        self.shortage = Trouble(_logger, f"remote {server.name} gets no requests because of its monthly budget")

    def accept(self, proof: Proof, due_s: float) -> None:
        """Store a new proof. The next probe is due at `due_s`."""
        self.proof, self.reason, self.failures, self.pause_s = proof, "", 0, FIRST_PAUSE_S
        self.due_s = due_s
        if len(self.models) >= MAX_MODELS:
            self.models.clear()
        self.models |= proof.models

    def refuse(self, reason: str, due_s: float) -> None:
        """Drop the proof. The next probe is due at `due_s`."""
        self.proof, self.reason, self.due_s = None, reason, due_s

    def again_s(self, now_s: float) -> float:
        """Return the seconds from `now_s` until AGAIN_S have passed since the last probe; 0 if they have passed."""
        return max(0.0, self.probed_s + AGAIN_S - now_s)

    def answered(self, *, failed: bool) -> None:
        """Count a failed call; a successful call resets the count."""
        self.failures = self.failures + 1 if failed else 0

    def next_pause_s(self) -> float:
        """Return the pause in seconds after a failed probe, and double the next pause, up to MAX_PAUSE_S."""
        pause_s, self.pause_s = self.pause_s, min(MAX_PAUSE_S, 2 * self.pause_s)
        return pause_s


class Remotes:
    """All remote servers of a gateway. The argument `run` executes a request in this cluster; `now_s` returns the
    broker's time in seconds since 1970. Not thread-safe. Raises SettingError if the environment variable of a token is
    not set, or if the token is not valid in a header.
    """

    def __init__(
        self,
        servers: Sequence[RemoteServer],
        settings: Settings,
        broker: Store,
        feed: CatalogueFeed,
        fleet: Fleet,
        metrics: Metrics,
        run: Callable[[Call, InferRequest], Awaitable[RequestResult]],
        now_s: Callable[[], float],
    ) -> None:
        self._feed = feed
        self._fleet = fleet
        self._metrics = metrics
        self._run = run
        self._clock = time.monotonic
        bucket = RecordBucket(broker, REMOTES_BUCKET, replicas=settings.stream_replicas)
        self._record: Record[Stored] = Record(bucket, _decode, lambda key, value, revision: None)
        self._remotes = [
            Remote(
                server,
                RemoteClient(server, _token(server)),
                MonthlyBudget(self._record, server.name, server.monthly_tokens, now_s),
            )
            for server in servers
        ]
        for server in servers:
            metrics.remote_ready.labels(server.name).set(0)

    async def instead(self, call: Call, request: PlannedRequest, error: SIEError) -> RequestResult | None:
        """Return a remote server's result for a request that this cluster refused with `error`. Return None if no
        remote server ran the request: the client then gets `error`. Raises RateLimited, PayloadTooLarge.
        """
        if error.code not in REFUSALS or not _may_leave(call, request):
            return None
        entry, run = request.resolved.entry, request.options.run
        texts: list[str] = []
        for remote in self._remotes:
            if remote.server.model != entry.id:
                continue
            texts = texts or [Prompt.from_options(run).around(item.text or "") for item in request.items]
            proof = remote.proof
            if proof is None or not proof.covers(entry, run, texts):
                self._count(remote, "unproven")
            elif (answer := await self._answer(remote, proof, call, request, texts)) is not None:
                return answer
        return None

    async def _answer(
        self, remote: Remote, proof: Proof, call: Call, request: PlannedRequest, texts: Sequence[str]
    ) -> RequestResult | None:
        entry, sizes = request.resolved.entry, [utf8_bytes(text) for text in texts]
        costs = [estimated_tokens(size, entry.max_tokens) for size in sizes]
        began_s = time.perf_counter()
        left_s = call.received_s + call.budget_s - began_s
        if left_s < MIN_LEFT_S:
            return None
        if call.charge is not None:
            call.charge.refund()  # the charge of the failed attempt in this cluster
            call.charge.spend(sum(costs), request.inputs_field)
        try:
            async with asyncio.timeout(min(BROKER_S, left_s)):
                month = await remote.budget.spend(sum(costs))
        except BudgetUsed as used:
            self._count(remote, "budget")
            remote.shortage.met(used)
            return None
        except (BrokerError, TimeoutError) as error:  # without the broker, nobody knows how much of the budget is left
            self._count(remote, "budget")
            remote.shortage.met(f"the broker did not report the tokens left: {str(error) or type(error).__name__}")
            return None
        remote.shortage.passed()
        left_s = call.received_s + call.budget_s - time.perf_counter()
        try:
            vectors, used_tokens, models = await remote.client.encode(
                texts, proof.width, left_s, normalize=request.options.run.normalize
            )
            if not models <= remote.models:
                self._refuse(remote, "it reports a model that its proof does not name", remote.again_s(self._clock()))
                raise RemoteFailed(remote.reason)
            if not proof.accepts(vectors):
                raise RemoteFailed("its vectors do not have the length 1")
        except RemoteFailed as failure:
            self._failed(remote, failure)
            return None
        remote.answered(failed=False)
        if self._feed.catalogue.entries.get(entry.id) != entry:  # the entry has changed since the proof
            return None
        # a text has at most one token for each byte: limit the cost to this number, if the server reports more tokens
        most = sum(sizes) + proofs.SPECIAL_TOKENS * len(sizes)
        tokens = sum(costs) if used_tokens is None else min(used_tokens, most)
        await self._correct(remote, tokens - sum(costs), month, call.received_s + call.budget_s - time.perf_counter())
        self._count(remote, "served")
        self._metrics.remote_tokens.labels(remote.server.name).inc(tokens)
        elapsed_ms = (time.perf_counter() - began_s) * 1000
        finished = _result(call, request, remote.server.name, proof, texts, vectors, _shares(costs, tokens), elapsed_ms)
        if call.charge is not None:
            call.charge.settle(tokens)
        self._metrics.used(call.grant.name, tokens, 0.0)
        return finished

    async def _correct(self, remote: Remote, difference: int, month: str, left_s: float) -> None:
        if not difference:  # the charge is right, so do not wait for the broker
            return
        try:
            async with asyncio.timeout(min(BROKER_S, left_s)):
                await remote.budget.correct(difference, month)
        except (BrokerError, TimeoutError) as error:  # only logged, because the remote server has computed the vectors
            reason = str(error) or type(error).__name__
            _logger.warning("the charge for a call of remote %s stays an estimate: %s", remote.server.name, reason)

    def _failed(self, remote: Remote, failure: RemoteFailed) -> None:
        """Count a failed call. If the server is at fault, probe it again soon. After MAX_FAILURES calls in a row with a
        fault of the server, send it no requests until it passes a probe.
        """
        self._count(remote, "failed")
        if not failure.is_fault:
            return
        remote.answered(failed=True)
        _logger.warning("remote %s failed: %s", remote.server.name, failure)
        if remote.proof is None:
            return
        # probe again soon, because after an outage another server may run at this address
        now_s = self._clock()
        remote.due_s = min(remote.due_s, now_s + remote.again_s(now_s))
        if remote.failures >= MAX_FAILURES:
            pause_s = max(FIRST_PAUSE_S, remote.again_s(now_s))
            self._refuse(remote, f"{remote.failures} calls in a row failed, the last: {failure}", pause_s)

    def _count(self, remote: Remote, result: str) -> None:
        self._metrics.remote_requests.labels(remote.server.name, result).inc()

    async def run(self, stop: Stop) -> None:
        """Probe each remote server when its probe is due, until `stop`."""
        try:
            await asyncio.gather(*(self._follow(remote, stop) for remote in self._remotes))
        finally:
            for remote in self._remotes:
                await remote.client.close()

    async def _follow(self, remote: Remote, stop: Stop) -> None:
        while not await stop.wait_for(CHECK_S):
            if not self._feed.first.is_set():
                continue
            entry = self._feed.catalogue.entries.get(remote.server.model)
            if remote.proof is not None and remote.proof.entry != entry:
                remote.models.clear()
                self._refuse(remote, "the entry of its model has changed since its proof", 0.0)
            if self._clock() >= remote.due_s:
                await self._probe(remote)

    async def _probe(self, remote: Remote) -> None:
        """Probe a remote server, and store its proof, or the reason why the server gets no requests."""
        name = remote.server.name
        remote.probed_s = self._clock()
        try:
            proof = await self._proven(remote)
        except Deviates as error:
            remote.models.clear()
            self._set_agreement(remote, error.agreement.cosine, error.agreement.difference)
            self._refuse(remote, f"its vectors are not those of {remote.server.model}: {error}", DEVIATES_S)
        except NoReference as error:
            self._refuse(remote, str(error), FIRST_PAUSE_S)
        except BudgetUsed as error:
            self._refuse(remote, str(error), MAX_PAUSE_S)
        except (RemoteFailed, BrokerError, SIEError, FailedRequest, EntryChanged) as error:
            self._refuse(remote, f"its probe failed: {error}", remote.next_pause_s())
        except Exception as error:  # an error must not end the probes of other servers
            _logger.exception("the probe of remote %s failed", name)
            self._refuse(remote, f"its probe failed: {type(error).__name__}", MAX_PAUSE_S)
        else:
            if remote.proof is None:
                scope = "texts of any length" if proof.any_length else "texts that are surely not truncated"
                _logger.info(
                    "remote %s is proven for %s, %s: lowest cosine %.7f, largest relative difference %.2e",
                    name,
                    remote.server.model,
                    scope,
                    proof.cosine,
                    proof.difference,
                )
            self._set_agreement(remote, proof.cosine, proof.difference)
            self._metrics.remote_ready.labels(name).set(1)
            remote.accept(proof, self._clock() + (PROVEN_S if proof.fingerprint else GOLDEN_S))

    def _refuse(self, remote: Remote, reason: str, pause_s: float) -> None:
        if remote.reason != reason:
            _logger.warning("remote %s gets no requests: %s", remote.server.name, reason)
        self._metrics.remote_ready.labels(remote.server.name).set(0)
        remote.refuse(reason, self._clock() + pause_s)

    def _set_agreement(self, remote: Remote, cosine: float, difference: float) -> None:
        self._metrics.remote_cosine.labels(remote.server.name).set(cosine)
        self._metrics.remote_difference.labels(remote.server.name).set(difference)

    async def _proven(self, remote: Remote) -> Proof:
        """Return the proof that the server's vectors equal the reference vectors of its model. Raises NoReference,
        Deviates, BudgetUsed, BrokerError, RemoteFailed, and the errors of requests in this cluster.
        """
        model = remote.server.model
        catalogue = self._feed.catalogue
        if model not in catalogue.entries:
            raise NoReference(f"the catalogue has no model {model}")
        resolved = catalogue.resolve(model, follow=False)
        if "dense" not in resolved.entry.outputs:
            raise NoReference(f"{model} has no dense vectors")
        run = proofs.plain_run(resolved)
        if run.dtype != "float32":
            raise NoReference(f"the entry of {model} sets the dtype {run.dtype}: its vectors must be float32")
        reference = await self._reference(resolved) or proofs.golden_reference(resolved.entry, run)
        if reference is None:
            raise NoReference(
                f"{model} has no vectors to compare with: load it once in this cluster (`sie models load {model}`), or "
                "name golden vectors in its entry"
            )
        max_tokens = resolved.entry.max_tokens
        cost = sum(estimated_tokens(utf8_bytes(text), max_tokens) for text in reference.texts)
        await remote.budget.spend(cost)
        vectors, models = await self._vectors(remote, reference, normalize=run.normalize)
        return replace(proofs.prove(resolved.entry, run, reference, vectors), models=models)

    async def _vectors(
        self, remote: Remote, reference: Reference, *, normalize: bool
    ) -> tuple[Vectors, frozenset[str]]:
        """Return (vectors, models): the server's vectors of the reference texts, and the model names in its replies. If
        the server refuses the text `reference.long`, the vector of this text has only zeros, which differ from every
        reference vector. Raises RemoteFailed.
        """
        width, timeout_s = reference.vectors.shape[1], remote.server.timeout_s
        texts = [text for place, text in enumerate(reference.texts) if place != reference.long]
        vectors, _, models = await remote.client.encode(texts, width, timeout_s, normalize=normalize)
        if reference.long is None:
            return vectors, models
        try:
            long, _, _ = await remote.client.encode(
                [reference.texts[reference.long]], width, timeout_s, normalize=normalize
            )
        except RemoteFailed as error:
            if error.is_fault:
                raise
            long = 0 * vectors[:1]
        return np.concatenate([vectors, long]), models  # the long text is last

    async def _reference(self, resolved: Resolved) -> Reference | None:
        """Return the stored reference vectors of this entry. If workers have loaded the model, but none of them reports
        the fingerprint of the stored vectors, a worker computes new vectors. Return None if no vectors are stored and
        no worker has the model loaded in a precision that BOUNDS lists. Raises BrokerError, SIEError, FailedRequest,
        EntryChanged.
        """
        entry = resolved.entry
        key = f"reference.{model_token(entry.id)}"
        stored = await self._record.bucket.get(key)
        current = None if stored is None else _reference_in(stored, entry)
        statuses = self._loaded(resolved)
        fingerprints = {status.fingerprint for status in statuses}
        if current is not None and (not statuses or current.fingerprint in fingerprints):
            return current
        served = {status.precision.served for status in statuses if status.precision is not None}
        # of the precisions in which workers have loaded the model, use the one with the highest required cosine
        precision = max(served & proofs.BOUNDS.keys(), key=lambda name: proofs.BOUNDS[name].cosine, default="")
        if not precision:
            return current
        computed = await self._computed(resolved, precision)
        await self._record.bucket.write([Write(key, messages.encode(computed), None)])
        _logger.info("stored new reference vectors of %s, computed by a worker in %s", entry.id, precision)
        return proofs.stored_reference(computed, entry)

    def _loaded(self, resolved: Resolved) -> list[ModelStatus]:
        try:
            lane = self._fleet.lane(resolved, pool="", machine_profile="", known_pools=())
        except SIEError:  # no lane can serve the model
            return []
        return self._fleet.loaded(lane, resolved.residency)

    async def _computed(self, resolved: Resolved, precision: str) -> RemoteReference:
        """Let a worker of this cluster compute the vectors of the probe texts. Raises SIEError, FailedRequest,
        EntryChanged.
        """
        prompts = proofs.prompts_of(resolved)
        rows: list[Any] = []
        fingerprint = ""
        long = proofs.long_text(resolved.entry)
        requests = [(parameters, proofs.PROBES) for parameters in prompts.values()]
        for parameters, texts in [*requests, *([({"prompt_name": None}, (long,))] if long else [])]:
            # the priority `bulk` ensures that this cluster computes the vectors: only interactive requests may leave it
            call = Call(
                uuid7(),
                time.perf_counter(),
                {"x-sie-priority": "bulk", "x-sie-cache": "no-store"},
                grant=Grant(KEY, name=KEY),
                budget_s=BUDGET_S,
            )
            items = tuple(map(RequestItem, texts))
            request = InferRequest("encode", resolved, items, {"output_types": ["dense"], **parameters})
            finished = await self._run(call, request)
            rows += [
                array_of(result, outcome, "dense").astype("<f4") for result, outcome in finished.succeeded("items")
            ]
            fingerprint = finished.fingerprint
        block = b"".join(row.tobytes() for row in rows)
        source = proofs.source_of(resolved.entry)
        return RemoteReference(source, precision, fingerprint, tuple(prompts), len(rows[0]), block, bool(long))

    def findings(self) -> list[ClusterFinding]:
        """Return a finding for each remote server that was probed and gets no requests, with the reason."""
        return [
            ClusterFinding(
                check="remotes",
                wrong=f"remote {remote.server.name} gets no requests: {remote.reason}",
                fix="docs/remote.md says what each reason means; a new probe runs by itself",
            )
            for remote in self._remotes
            if remote.proof is None and remote.reason != UNTESTED
        ]


def _token(server: RemoteServer) -> Secret | None:
    token = secret_variable(server.token_env) if server.token_env else None
    if server.token_env and token is None:
        raise SettingError(SETTING, f"remote {server.name}: its token_env, {server.token_env}, is not set")
    if token is not None and not (token.reveal().isascii() and token.reveal().isprintable()):
        cause = "must have only printable ASCII characters, and no line end"
        raise SettingError(SETTING, f"remote {server.name}: its token_env, {server.token_env}, {cause}")
    return token


def _reference_in(stored: Entry, entry: ModelEntry) -> Reference | None:
    """Return the reference vectors in a record; None if the record is unreadable, or for another model entry."""
    try:
        value = _decode(stored)
    except UNDECODABLE as error:
        _logger.warning("ignored the undecodable reference vectors of %s: %s", entry.id, error)
        return None
    return proofs.stored_reference(value, entry) if isinstance(value, RemoteReference) else None


def _decode(entry: Entry) -> Stored:
    if entry.value is None:
        raise ValueError("the record was removed")
    stored: Stored = records.decode_remote(entry.value)
    return stored


def _may_leave(call: Call, request: PlannedRequest) -> bool:
    """Return True if a request may be sent to a remote server: its credential allows this, none of its headers is in
    _PINNED, it is an interactive encode with the default profile, and its inputs are plain texts of at most MAX_BYTES.
    """
    if not call.grant.remote or any(name in call.headers for name in _PINNED):
        return False
    if sum(item.size for item in request.items) > MAX_BYTES:
        return False
    if request.operation != "encode" or request.priority != "interactive" or request.resolved.profile != "default":
        return False
    return all(
        item.text and not item.modalities and item.size == utf8_bytes(item.text) and item.chunks is None
        for item in request.items
    )


def _shares(costs: Sequence[int], tokens: int) -> list[int]:
    """Split the number `tokens` into integers in proportion to `costs`."""
    total, passed, shares = sum(costs), 0, list[int]()
    for cost in costs:
        before = passed * tokens // total
        passed += cost
        shares.append(passed * tokens // total - before)
    return shares


def _result(
    call: Call,
    request: PlannedRequest,
    name: str,
    proof: Proof,
    texts: Sequence[str],
    vectors: Vectors,
    tokens: Sequence[int],
    elapsed_ms: float,
) -> RequestResult:
    """Return the result of a request whose vectors came from the remote server `name`."""
    width = proof.width
    outcomes = tuple(
        Ok({"dense": ArraySlice("<f4", (width,), 4 * width * place)}, tokens=count)
        for place, count in enumerate(tokens)
    )
    answer = WorkResult(
        call.work_id,
        0,
        f"remote/{name}",
        outcomes,
        vectors.astype("<f4", copy=False).tobytes(),
        revision=request.resolved.entry.revision,
        fingerprint=proof.fingerprint,
        stages=Stages(inference_ms=elapsed_ms, worker_ms=elapsed_ms),
    )
    # a remote server does not report which texts it truncated
    if not all(proofs.fits(text, request.resolved.entry.max_tokens) for text in texts):
        request = request.with_warnings(MAYBE_TRUNCATED)
    finished = RequestResult(request, {})
    finished.served_by = name
    finished.add_results([*range(len(tokens))], [Chunk(0, len(tokens), sum(tokens))], [answer], [elapsed_ms])
    return finished
