"""Client of the config service for `sie models`. It repeats calls without an answer, and explains refusals.

call ──► config service ──► body
 ▲            ├ no answer, or an answer with a retry time: again, with the same Idempotency-Key, for RETRY_S
 └────────────┤
              └ refused: the service's message, the fields with their lines, the differences, and the next step
"""

from __future__ import annotations

import functools
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import click
import httpx
import msgspec
from msgspec import UNSET, Struct

from sie_cli.cluster import CONFIG_URL, GATEWAY_URL, SOURCE, Cluster, cluster_options
from sie_cli.display import printable
from sie_cli.gateway_client import HttpConnection
from sie_cli.refusal import CommandRefused
from sie_contracts.api.configs import ConfigModels, Written
from sie_contracts.errors import UNDECODABLE
from sie_contracts.loopback import cause_of
from sie_contracts.settings import public_url
from sie_contracts.url_names import quoted

F = TypeVar("F", bound=Callable[..., Any])
MODELS = "/v1/configs/models"
JSON, YAML = "application/json", "application/x-yaml"
RETRY_S = 20.0
FIRST_PAUSE_S, MAX_PAUSE_S = 0.2, 5.0
_OF_DOCUMENT = frozenset({400, 409, 413, 422})  # HTTP statuses that mean a fault in the sent document
# Reasons of refusals for security, such as remote code. The message of the service already names a remedy, so the
# command adds no line of _NEXT.
_ABOUT_TRUST = frozenset({"remote_code", "model_path"})
_ENVELOPE = "in another form than a config service"


class Rejected(CommandRefused):
    """Raised if the config service refuses the sent document. The service may accept other documents."""


@dataclass(frozen=True)
class ServiceReply:
    """Successful reply. `body`: the decoded body. `plain`: the body as a map, including fields that this version does
    not know. `revision`: the model's revision, from the header ETag.
    """

    body: Any
    revision: int | None = None
    plain: Any = None


@dataclass(frozen=True)
class WriteOptions:
    """Options of a write. `dry_run`: only check. `if_match`: write only if this is the model's revision. `force`:
    write although a model exists, or although an alias needs the model as it is. `output`: format of the printed reply
    (table, json, yaml); None for the command's default.
    """

    cluster: Cluster
    dry_run: bool = False
    if_match: int | None = None
    output: str | None = None
    force: bool = False

    def service(self) -> ConfigServiceClient:
        """Return a client of the config service. Raises UsageError if its address is not configured."""
        return service_of(self.cluster, writes=True)

    def send(self, method: str, path: str, body: bytes = b"", content_type: str = JSON) -> ServiceReply:
        """Send a write with the options in this object, and return the reply. Raises UsageError, CommandRefused."""
        with self.service() as service:
            return service.write(method, path, body, content_type, how=self)


class ConfigServiceClient(HttpConnection):
    def read(self, path: str, body_type: Any) -> ServiceReply:
        """Send a GET and return the reply. `body_type`: the type to decode its body to. Raises CommandRefused."""
        return self._send("GET", path, b"", {"accept": JSON}, body_type)

    def write(
        self,
        method: str,
        path: str,
        body: bytes,
        content_type: str = JSON,
        *,
        how: WriteOptions,
        body_type: Any = Written,
    ) -> ServiceReply:
        """Send a write and return the reply. An Idempotency-Key makes repeated attempts safe. `body_type`: the type to
        decode the body to. Raises CommandRefused.
        """
        headers = {"content-type": content_type, "idempotency-key": uuid.uuid4().hex}
        if how.if_match is not None:
            headers["if-match"] = f'"{how.if_match}"'
        flags = [name for name in ("dry_run", "force") if getattr(how, name)]
        query = "?" + "&".join(f"{name}=true" for name in flags) if flags else ""
        return self._send(method, path + query, body, headers, body_type)

    def add(self, model: str, body: bytes, content_type: str, *, write: WriteOptions) -> ServiceReply:
        """Add a model, or with `force` replace an existing model. Raises CommandRefused."""
        is_there = write.force and any(row.model_id == model for row in self.read(MODELS, ConfigModels).body.models)
        method, path = ("PUT", path_of(model)) if is_there else ("POST", MODELS)
        return self.write(method, path, body, content_type, how=write)

    def _send(self, method: str, path: str, body: bytes, headers: dict[str, str], body_type: Any) -> ServiceReply:
        end_s, pause_s, is_announced = time.monotonic() + RETRY_S, FIRST_PAUSE_S, False
        while True:
            try:
                answer = self._exchange(method, path, content=body, headers=headers)
                if answer.headers.get("x-should-retry") != "true":
                    return self._accepted(method, answer, body_type)
                after = answer.headers.get("retry-after", "1")
                # A proxy may send a date as retry-after. The client does not parse dates, but waits for MAX_PAUSE_S.
                wait_s = float(after) if after.isdecimal() else MAX_PAUSE_S
                refusal = _refusal_of(answer)
                trouble = printable(refusal.error.message if refusal else f"status {answer.status_code}")
            except httpx.DecodingError as error:
                raise CommandRefused(f"{public_url(self.url)} replied {_ENVELOPE}: {_WRONG_URL}") from error
            except httpx.TransportError as error:
                wait_s, trouble = pause_s, f"no answer from {public_url(self.url)} ({cause_of(error)})"
                pause_s = min(MAX_PAUSE_S, 2 * pause_s)
            if time.monotonic() + wait_s > end_s:
                raise CommandRefused(f"{trouble}\n{_NOBODY}")
            if not is_announced and sys.stderr.isatty():
                click.echo(f"{trouble}; trying again for {RETRY_S:g} s", err=True)
                is_announced = True
            time.sleep(wait_s)  # the time in the header retry-after, or a growing pause if no answer came

    def _accepted(self, method: str, answer: httpx.Response, body_type: Any) -> ServiceReply:
        if answer.is_success:
            tag = answer.headers.get("etag", "").strip('"')
            try:
                body = msgspec.json.decode(answer.content, type=body_type)
                plain = msgspec.json.decode(answer.content)
                return ServiceReply(body, int(tag) if tag.isascii() and tag.isdigit() else None, plain)
            except UNDECODABLE as error:
                raise CommandRefused(f"{public_url(self.url)} replied {_ENVELOPE}: {_WRONG_URL}\n{error}") from error
        refusal, status = _refusal_of(answer), answer.status_code
        if refusal is None:
            lines = [f"{public_url(self.url)} replied with status {status}, {_ENVELOPE}: {_WRONG_URL}"]
        else:
            lines = self._lines(method, answer.request.url.path, refusal)
        of_document = status in _OF_DOCUMENT or (refusal is not None and refusal.error.reason in _ABOUT_TRUST)
        raise (Rejected if of_document else CommandRefused)("\n".join(map(printable, lines)))

    def _lines(self, method: str, path: str, refusal: _RefusalBody) -> list[str]:
        error = refusal.error
        lines = [_field(error.message)]
        faults = error.errors or refusal.errors or []
        if len(faults) > 1:
            placed = [(fault, f" (line {fault.line})" if fault.line else "") for fault in faults]
            lines += [f"  {_field(fault.loc)}{line}: {fault.message}" for fault, line in placed]
        lines += [
            f"  {_field(change.path)}: {shown(change.before)} -> {shown(change.after)}" for change in error.diff or ()
        ]
        if error.code == "METHOD_NOT_ALLOWED" and (service := self._config_url()):
            lines.append(
                f"{public_url(self.url)} is a gateway, which answers only reads; its config service is at {service}: "
                f"use --url {service}"
            )
        elif error.code == "CONTENT_CONFLICT" and error.revision is not None and error.reason != "aliased":
            is_add = method == "POST" and path == MODELS
            only = f"--if-match {error.revision}"
            again = (
                f"replace it with --force; add {only} to replace only this revision"
                if is_add
                else f"repeat with {only}"
            )
            lines.append(f"look at the stored model with `sie models show`, then {again}")
        elif error.code in _NEXT and error.reason not in _ABOUT_TRUST:
            lines.append(_NEXT[error.code])
        return lines

    def _config_url(self) -> str | None:
        try:
            health = msgspec.json.decode(self._exchange("GET", "/health").content)
        except (httpx.HTTPError, CommandRefused, *UNDECODABLE):
            return None
        return health.get("config_url") if isinstance(health, dict) else None


_NOBODY = "is it running? If it has another address, name the address with --url: config_url in /health of a gateway"
_WRONG_URL = (
    "name a local `sie serve` with --data-dir, or the config service with --url (/health of a gateway has its address "
    "as config_url)"
)
_NEXT = {
    "UNAUTHENTICATED": (
        "set SIE_ADMIN_TOKEN here to the token that the config service was started with, or run this command in a "
        "terminal, where it asks for the token"
    ),
    "PERMISSION_DENIED": "writes need the SIE_ADMIN_TOKEN that the config service was started with",
    "IDEMPOTENCY_MISMATCH": "run the command again: each run sends a new idempotency key",
}


class _FaultFields(Struct):
    loc: str
    message: str
    line: int | None = None


class _ChangedField(Struct):
    path: str
    before: Any = UNSET
    after: Any = UNSET


class _RefusalFields(Struct):
    message: str
    code: str | int | None = None  # null or a number if another server or a proxy sent the error
    reason: str | None = None
    revision: int | None = None
    errors: list[_FaultFields] | None = None
    diff: list[_ChangedField] | None = None


class _RefusalBody(Struct):
    error: _RefusalFields
    errors: list[_FaultFields] | None = None


def _refusal_of(answer: httpx.Response) -> _RefusalBody | None:
    """Return the decoded body of a refusal; None if the body does not have the form of a config service's refusal."""
    try:
        return msgspec.json.decode(answer.content, type=_RefusalBody)
    except UNDECODABLE:
        return None


def _field(path: str) -> str:
    return path.removeprefix("$.")


def shown(value: Any) -> str:
    return "(absent)" if value is UNSET else msgspec.json.encode(value).decode()


def path_of(model: str, suffix: str = "") -> str:
    return f"{MODELS}/{quoted_model(model)}{suffix}"


def quoted_model(model: str) -> str:
    """Return the id of a model escaped for a URL path. Raises CommandRefused."""
    try:
        return quoted(model, "model")
    except ValueError as error:
        raise CommandRefused(str(error)) from error


def service_options(command: F, *, looks_around: bool = True) -> F:
    """Add the options for the address of the config service and for the output format to a command."""
    formats = click.Choice(("table", "json", "yaml"))
    output = click.option("-o", "output", type=formats, default=None, help="Format in which the answer is printed.")
    return cluster_options(CONFIG_URL, looks_around=looks_around)(output(command))


def write_options(force: str, *, looks_around: bool = True) -> Callable[[F], F]:
    """Return a decorator that adds --if-match, --dry-run and --force, and passes them as WriteOptions, the command's
    first argument. `force`: the help text of --force.
    """

    def decorate(command: F) -> F:
        @click.option("--force", is_flag=True, help=force)
        @click.option(
            "--if-match",
            type=click.IntRange(0),
            metavar="REVISION",
            help="Write only if this is the present revision of the model; else refuse.",
        )
        @click.option("--dry-run", is_flag=True, help="Do all checks, but store nothing.")
        @functools.wraps(command)
        def run(
            cluster: Cluster, *, dry_run: bool, if_match: int | None, output: str | None, force: bool, **options: Any
        ) -> Any:
            return command(WriteOptions(cluster, dry_run, if_match, output, force), **options)

        return service_options(cast(F, run), looks_around=looks_around)

    return decorate


def service_of(cluster: Cluster, *, writes: bool) -> ConfigServiceClient:
    """Return a client of the config service. If no config service is configured, the client reads from the gateway of
    the running `sie serve`. If no token is configured, ask for one on a terminal. Raises UsageError if no address is
    configured.
    """
    url, secret = cluster.settings.config_service_url, cluster.config_token(writes=writes)
    if url is None and not writes and cluster.sources[GATEWAY_URL] == SOURCE:
        url, secret = cluster.gateway_urls[0], cluster.gateway_token
    if url is None:
        raise click.UsageError(f"{cluster.missing(CONFIG_URL)} (/health of a gateway has the address as config_url)")
    token = secret.reveal() if secret else ""
    if not token and sys.stdin.isatty():
        token = str(click.prompt("SIE_ADMIN_TOKEN", hide_input=True, default="", show_default=False)).strip()
    return ConfigServiceClient(url, token)
