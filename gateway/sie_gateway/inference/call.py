"""A call as every route sees it: what the edge knows of the request, what is asked of a model, what goes back."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sie_contracts.errors import InvalidInput, SIEError, envelope
from sie_contracts.models.catalogue import Resolved
from sie_contracts.models.entries import ModelEntry
from sie_contracts.models.options import Side
from sie_contracts.sdk_versions import NATIVE, Dialect
from sie_contracts.wire.messages import Operation, Priority, RunOptions
from sie_contracts.wire.trace_context import NONE, Context
from sie_gateway.admission.grant import ANYBODY, Charge, Grant
from sie_runtime.http.server import Body, Receive

if TYPE_CHECKING:
    from sie_gateway.inference.body import RequestItem
    from sie_gateway.inference.intake import BodyReader
    from sie_gateway.inference.results import RequestResult
    from sie_runtime.spans import Span

ROUTE_KEY = "X-SIE-Route-Key"
MAX_KEY_CHARS = 128
_ROUTE_KEY_HEADER = ROUTE_KEY.lower()
ErrorShape = Callable[[SIEError, str, list[dict[str, Any]] | None], tuple[int, dict[str, Any]]]
"""The status and the JSON body of an error, of a request id and of the failures of single inputs, as a client family
reads them.
"""


def family(name: str) -> ErrorShape:
    """Errors with their own status, and the body that a family of `errors.FAMILIES` reads."""

    def shape(error: SIEError, request_id: str, errors: list[dict[str, Any]] | None) -> tuple[int, dict[str, Any]]:
        return error.status, envelope(error, request_id, errors, name)

    return shape


native_shape = family("native")


@dataclass
class Call:
    """One HTTP request: what the edge knows of it. `labels` are filled in as the request is understood, for metrics and
    logs.
    """

    id: str
    received_s: float
    headers: Mapping[str, str]
    labels: dict[str, str] = field(default_factory=dict)
    path: str = ""
    receive: Receive | None = None  # tells when the client goes away
    grant: Grant = ANYBODY  # what its credential is let in with
    charge: Charge = field(default_factory=Charge)  # the tokens that it uses of its key's quota
    shape: ErrorShape = native_shape
    dialect: Dialect = NATIVE
    budget_s: float = 0.0  # from received_s on
    model: str | None = None  # the name of a model that the path has; None where the body names it
    resolved: Resolved | None = None  # the model of that name
    client: str = ""  # its address
    body: bytes = b""  # of an inference request
    reader: BodyReader | None = None  # of its body, where a connection brought it
    infer_request: InferRequest | None = None  # the last one that was understood
    attempt: int = 0  # how often it began anew because the model's entry changed
    finished: RequestResult | None = None  # what ran last
    code: str = ""  # of the error that it was answered with
    message: str = ""  # of that error
    context: Context = NONE  # of its trace, which its work carries on: our span's, or else its client's
    span: Span | None = None  # where this gateway traces

    def follow(self, previous: Call) -> None:
        """Be answered with the run of another call, by the same request: all that is told of that one is
        told of this.
        """
        self.labels.update(previous.labels)
        self.shape, self.infer_request, self.finished = previous.shape, previous.infer_request, previous.finished
        if self.span is not None and previous.span is not None:
            self.span.lead_to(previous.span)

    def again(self) -> None:
        """Begin anew, with other work: that of before is given back."""
        self.attempt += 1
        self.charge.refund()

    @property
    def explains(self) -> bool:
        """Whether the client asks where the time was spent."""
        return self.headers.get("x-sie-explain") == "1"

    def digest(self) -> bytes:
        """Digest by which a repeated request of the same client is recognised."""
        parts = (
            self.key,
            self.client,
            self.path,
            self.headers.get("x-sie-timeout-ms", ""),
            self.headers.get("x-sie-priority", ""),
        )
        return hashlib.blake2b("\0".join(parts).encode() + b"\0" + self.body, digest_size=16).digest()

    @property
    def work_id(self) -> str:
        """Id of its work: a new id at each attempt, so that no result of an earlier attempt counts."""
        return f"{self.id}-{self.attempt}" if self.attempt else self.id

    @property
    def key(self) -> str:
        """Whose turn it takes among others: one name per credential, the same for all who need none."""
        return self.grant.key


def route_key(call: Call | None) -> str:
    """The key by which calls get the same target of an alias: X-SIE-Route-Key, else the API key, else the client's
    address.

    A named one counts whoever sends it, so the writer and the readers of an index can agree on one. Empty for nobody's
    call, which gets the heaviest target. Raises InvalidInput.
    """
    if call is None:
        return ""
    named = call.headers.get(_ROUTE_KEY_HEADER, "")
    if not named:
        return f"key {call.key}" if call.key else f"client {call.client}"
    if len(named) > MAX_KEY_CHARS or not (named.isascii() and named.isprintable()):
        message = (
            f"{ROUTE_KEY}: expected at most {MAX_KEY_CHARS} printable ASCII characters, got {len(named)} characters"
        )
        raise InvalidInput(message, reason="schema", param=ROUTE_KEY)
    return f"named {named}"


@dataclass(frozen=True)
class EncodedReply:
    """A success, or what a client that waits for capacity takes for "not yet". A body in pieces may be read more than
    once.
    """

    body: Body
    content_type: str
    headers: dict[str, str]
    status: int = 200


@dataclass(frozen=True)
class InferRequest:
    """A request to a model, independent of the client's API. `parameters` is a map as a native body has it (contract
    5).

    `run` stands for all parameters where the operation takes none of a model's. `side` is that of texts whose side no
    parameter names: none on the routes of other servers, which then give what the model's own library gives.
    """

    operation: Operation
    resolved: Resolved
    items: tuple[RequestItem, ...]
    parameters: Mapping[str, Any]
    query: RequestItem | None = None
    priority: Priority | None = None  # what the body says; a header comes first
    run: RunOptions | None = None
    side: Side = "document"


class EntryChanged(Exception):
    """Gateway and workers do not know the same entry of the model: what was asked must be understood
    anew, all of it.
    """

    def __init__(self, entry: ModelEntry) -> None:
        """`entry` is the model's as it was understood."""
        super().__init__(entry.id)
        self.entry = entry
