"""The gate: every route and method has a scope, every credential has its scopes, and nothing else gets in."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import of_extras
import pytest
from click.testing import CliRunner
from inprocess import GatewayProcess, InProcess, clock_at, settings_of, until
from msgspec.structs import replace

from sie_broker import Write
from sie_broker.memory import MemoryServer
from sie_cli.serve.standalone import standalone
from sie_contracts.errors import MethodNotAllowed, NotFound, NotReady, PermissionDenied, SIEError, Unauthenticated
from sie_contracts.settings import SettingError
from sie_gateway.admission.grant import Grant
from sie_gateway.http.app import USER_SCOPES, Gate
from sie_gateway.http.routes import ROUTES
from sie_runtime import keys as records
from sie_runtime.clock import BrokerClock
from sie_runtime.http.config_routes import CONFIG_ROUTES
from sie_runtime.http.routes import ANY, OPEN, SCOPES, Route, Table
from sie_runtime.keys import KeyLimits, Keys
from sie_runtime.process import Stop

ADMIN, READER, USER = "admin-token-of-a-test", "reader-token-of-a-test", "user-token-of-a-test"
TOKENS = {"SIE_ADMIN_TOKEN": ADMIN, "SIE_CONFIG_READ_TOKEN": READER, "SIE_AUTH_TOKEN": USER}
EXAMPLES = {
    "{model:path}": "org/name",
    "{id:path}": "org/name",
    "{name}": "mine",
    "{file}": "mine",
    "{lane}": "_default.cpu.default",
}

# The documented scopes of the core once more: a test fails if a row loses its scope.
DOCUMENTED = """
    infer  POST /v1/encode/org/name /v1/score/org/name /v1/extract/org/name
    infer  POST /v1/embeddings /embeddings /v1/multi-vector /pooling
    infer  POST /v1/rerank /v2/rerank /v1/ranking /v1/score /score /v1/reranking /reranking
    read   GET /v1/models /v1/models/org/name /v1/pools /v1/pools/mine
    read   GET /v1/pools/assignments /health /docs
    admin  GET /v1/dead-letters /v1/dead-letters/{letter}
    admin  POST /v1/models/org/name/load /v1/models/org/name/unload
    admin  POST /v1/dead-letters/replay /v1/dead-letters/{letter}/replay
    admin  DELETE /v1/dead-letters /v1/dead-letters/{letter}
    any    GET /v1/whoami
    metrics GET /metrics
    read   GET /openapi.json /docs/static/mine /v1/scaling/_default.cpu.default /ws/cluster-status /ws/status
    read   GET /v1/configs/models /v1/configs/models/org/name /v1/configs/models/org/name/status
    read   GET /v1/configs/models/org/name/history
    read   GET /v1/configs/bundles /v1/configs/bundles/org/name /v1/configs/epoch
    read   POST /v1/configs/resolve
    pools  POST /v1/pools /v1/pools/mine/renew
    pools  DELETE /v1/pools/mine
    config GET /v1/configs/export
    config POST /v1/configs/models /v1/configs/models/org/name/rollback
    config PUT /v1/configs/models/org/name
    config PATCH /v1/configs/models/org/name
    config DELETE /v1/configs/models/org/name
    open   GET /healthz /livez /ping /readyz
"""


def example(row: Route) -> str:
    path = row.path
    for part, value in EXAMPLES.items():
        path = path.replace(part, value)
    return path


def calls() -> Iterator[tuple[Route, str, str]]:
    """Yield every row with its method and an example of its path."""
    for row in ROUTES:
        yield row, row.method, example(row)


def key_with(*scopes: str, expires_s: float = 0.0, limits: KeyLimits = records.NO_LIMITS) -> tuple[records.Key, str]:
    return records.create("a test", scopes, now_s=time.time(), expires_s=expires_s, limits=limits)


async def keys_of(*key_records: records.Key, clock: BrokerClock | None = None) -> Keys:
    """Return the keys of a gateway that has read these records from a broker."""
    server = MemoryServer()
    bucket = await records.bucket_of(server.connect("operator"), 1).open()
    for key in key_records:
        await bucket.write([Write(key.id, records.encode(key))])
    keys, stop = Keys(server.connect("gateway"), 1, clock or clock_at()), Stop()
    following = asyncio.create_task(keys.run(stop))
    await until(lambda: keys.loaded, "the keys are read")
    stop.request()
    await following
    return keys


def outcome(gate: Gate, method: str, path: str, token: str) -> type[Exception] | Grant:
    try:
        return gate.check(method, path, f"Bearer {token}" if token else "")
    except SIEError as error:
        return type(error)


def test_every_route_and_method_has_the_documented_scope() -> None:
    documented = {}
    for line in (DOCUMENTED + of_extras.routes("DOCUMENTED")).strip().splitlines():
        scope, method, *paths = line.split()
        documented.update({(method, path): scope for path in paths})
    assert {(method, path): row.scope or "open" for row, method, path in calls()} == documented, (
        "rows of the core are above, those of an extra in its tests/*_routes.py: see of_extras"
    )


def test_the_table_refuses_a_second_row_and_a_scope_that_does_not_exist() -> None:
    row = Route(method="GET", path="/a", scope="read")
    for rows in ([row, dataclasses.replace(row, method="PUT"), row], [dataclasses.replace(row, scope="reed")]):
        with pytest.raises(ValueError, match="GET /a"):
            Table(rows)


@pytest.mark.parametrize(
    ("path", "row"),
    [
        ("/v1/models/", "/v1/models"),
        ("/v1/pools/", "/v1/pools"),
        ("/v1/pools/assignments", "/v1/pools/assignments"),
        ("/v1/pools/mine", "/v1/pools/{name}"),
        ("/v1/pools/mine/renew/", "/v1/pools/{name}/renew"),
        ("/v1/configs/models/a/b/status", "/v1/configs/models/{id:path}/status"),
        ("/v1/configs/models/a/status/b", "/v1/configs/models/{id:path}"),
        ("/v1/encode/../../healthz", "/v1/encode/{model:path}"),
    ],
)
def test_the_most_specific_row_of_a_path_is_meant(path: str, row: str) -> None:
    assert {route.path for route in Table(ROUTES).match(path).methods.values()} == {row}


@pytest.mark.parametrize(
    "path",
    [
        "/v1/pools/a/b",
        "/v1/scaling/a/b",
        "//v1/encode/m",
        "/V1/encode/m",
        "/v1/encode/",
        "/healthz/x",
        "/readyz/../health",
        "/metrics/x",
        "",
        "/v1/chat/completions",
        "/vertex",
        "/invocations",
        "/v1/job",
        "*",
    ],
)
def test_a_path_that_no_row_has_is_not_found_and_only_by_those_who_may_read(path: str) -> None:
    gate = Gate(settings_of(SIE_AUTH_MODE="static", **TOKENS))
    assert [outcome(gate, method, path, USER) for method in ("GET", "POST", "DELETE")] == [NotFound] * 3
    assert outcome(gate, "GET", path, "") is Unauthenticated
    assert outcome(Gate(settings_of()), "GET", path, "") is NotFound


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW"])
def test_another_method_than_a_path_has_is_refused_with_those_it_has(method: str) -> None:
    gate = Gate(settings_of(SIE_AUTH_MODE="static", **TOKENS))
    paths = {path for _, _, path in calls()}
    for path in paths:
        methods = Table(ROUTES).match(path).methods
        if method in methods:
            continue
        with pytest.raises(MethodNotAllowed) as caught:
            gate.check(method, path, ADMIN)
        served = [name for name, row in methods.items() if row.served]
        assert caught.value.allow.split(", ") == [*served, *(["HEAD"] if "GET" in served else []), "OPTIONS"], path


async def test_every_credential_gets_into_what_its_scopes_say_and_nothing_else() -> None:
    """Each route, method and credential, in each mode, is compared with a second form of the rule."""
    subsets = [combination for count in range(1, 6) for combination in itertools.combinations(SCOPES, count)]
    key_triples = [(frozenset(scopes), *key_with(*scopes)) for scopes in subsets]
    expired_key, expired = key_with(*SCOPES, expires_s=time.time() - 1)
    revoked_key, revoked = key_with(*SCOPES)
    keys = await keys_of(*(key for _, key, _ in key_triples), expired_key, replace(revoked_key, revoked_s=time.time()))
    everybody: list[tuple[str, frozenset[str] | None]] = [
        ("", None),
        ("wrong", None),
        (expired, None),
        (revoked, None),
        (USER, USER_SCOPES),
        (ADMIN, frozenset(SCOPES)),
        (READER, None),
    ]
    of_keys: list[tuple[str, frozenset[str] | None]] = [(token, scopes) for scopes, _, token in key_triples]
    gates = {
        "none": (Gate(settings_of(**TOKENS)), everybody),
        "static": (Gate(settings_of(SIE_AUTH_MODE="static", **TOKENS)), everybody),
        "token": (Gate(settings_of(SIE_AUTH_MODE="token", **TOKENS), keys), everybody + of_keys),
    }
    count = 0
    for mode, (gate, credentials) in gates.items():
        for row, method, path in calls():
            for token, scopes in credentials:
                if row.reader and token == READER:
                    scopes = frozenset({row.scope})
                if row.scope == OPEN or (mode == "none" and row.scope not in ("config", "admin")):
                    expected = MethodNotAllowed if not row.served else Grant
                elif scopes is None:
                    expected = Unauthenticated
                elif row.scope not in (ANY, *scopes):
                    expected = PermissionDenied
                else:
                    expected = MethodNotAllowed if not row.served else Grant
                verdict = outcome(gate, method, path, token)
                verdict = type(verdict) if isinstance(verdict, Grant) else verdict
                assert verdict is expected, f"{mode}: {method} {path} with {sorted(scopes or ())}"
                count += 1
    assert count > 3000


def test_a_gateway_serves_reads_of_the_catalogue_and_neither_its_writes_nor_its_export() -> None:
    gate = Gate(settings_of(SIE_AUTH_MODE="static", **TOKENS))
    served = {"models", "model", "status", "bundles", "bundle", "resolve"}
    for route in CONFIG_ROUTES:
        is_served = route.endpoint in served and route.scope == "read"
        path = route.path.replace("{id:path}", "org/name")
        expected = MethodNotAllowed if not is_served else Grant
        outcomes = [outcome(gate, route.method, path, token) for token in (USER, ADMIN)]
        kinds = [type(verdict) if isinstance(verdict, Grant) else verdict for verdict in outcomes]
        assert kinds == [expected if route.scope == "read" else PermissionDenied, expected], path
    read = {
        path
        for row, method, path in calls()
        if row.scope != OPEN and isinstance(outcome(gate, method, path, READER), Grant)
    }
    assert read == {"/v1/whoami", "/v1/pools/assignments"}


def test_pool_writes_are_for_users_or_for_administrators_alone() -> None:
    """With SIE_POOL_WRITE_ROLE=admin only an administrator writes, also in mode none. Users still read."""
    writes = [("POST", "/v1/pools"), ("POST", "/v1/pools/mine/renew"), ("DELETE", "/v1/pools/mine")]
    for mode in ("none", "static"):
        user, admin = (
            Gate(settings_of(SIE_AUTH_MODE=mode, SIE_POOL_WRITE_ROLE=role, **TOKENS)) for role in ("user", "admin")
        )
        for write in writes:
            assert isinstance(outcome(user, *write, USER), Grant)
            refused = outcome(admin, *write, USER)
            assert refused is PermissionDenied
            assert isinstance(outcome(admin, *write, ADMIN), Grant)
            assert outcome(admin, *write, "") is Unauthenticated
        assert isinstance(outcome(admin, "GET", "/v1/pools/mine", USER), Grant)


async def test_a_credential_is_told_what_its_scopes_let_it_do(cluster: InProcess) -> None:
    """/v1/whoami reports the scopes of every kind of credential, in each mode."""
    bucket = await records.bucket_of(cluster.server.connect("operator"), 1).open()
    key, token = key_with("infer", "metrics")
    await bucket.write([Write(key.id, records.encode(key))])
    everything, user = list(SCOPES), ["infer", "read", "pools"]
    unguarded = ["infer", "read", "metrics", "pools"]
    for mode, role, expected_scopes in (
        ("none", "user", {"": unguarded, "wrong": unguarded, USER: unguarded, ADMIN: everything}),
        ("none", "admin", {"": ["infer", "read", "metrics"], ADMIN: everything}),
        ("static", "user", {"": None, "wrong": None, USER: user, READER: [], ADMIN: everything}),
        ("static", "admin", {USER: ["infer", "read"], ADMIN: everything}),
        ("token", "user", {"": None, "wrong": None, token: ["infer", "metrics"], USER: user}),
    ):
        gateway = await cluster.gateway(SIE_AUTH_MODE=mode, SIE_POOL_WRITE_ROLE=role, **TOKENS)
        answers = await statuses(gateway, [("GET", "/v1/whoami", bearer) for bearer in expected_scopes])
        for (credential, scopes), answer in zip(expected_scopes.items(), answers, strict=True):
            if scopes is None:
                assert answer.status_code == 401
                continue
            body = answer.json()
            assert (answer.status_code, body["scopes"], body["auth_mode"]) == (200, scopes, mode), credential
            assert not credential or credential not in answer.text
            if credential == token:
                assert body["name"] == key.id


async def test_a_key_is_known_by_its_id_and_brings_its_limits() -> None:
    """A static token has a name that is not the token."""
    limits = KeyLimits(body_bytes=10, items=2, tokens_per_minute=30)
    key, token = key_with("infer", limits=limits)
    gate = Gate(settings_of(SIE_AUTH_MODE="token", **TOKENS), await keys_of(key))
    grant = gate.check("POST", "/v1/encode/m", f"bearer  {token} ")
    assert (grant.key, grant.limits) == (key.id, limits)
    static_grants = [gate.check("POST", "/v1/encode/m", static_token) for static_token in (USER, ADMIN)]
    assert len({grant.key, *(static_grant.key for static_grant in static_grants)}) == 3
    assert all(
        static_grant.limits == records.NO_LIMITS and static_grant.key not in (USER, ADMIN)
        for static_grant in static_grants
    )


@pytest.mark.parametrize("now_s", [1e3, 1e11])  # years behind the clock of this machine, and ahead of it
async def test_keys_expire_by_the_clock_of_the_broker(now_s: float) -> None:
    gates, tokens = {}, {}
    for left_s in (10.0, -10.0):
        key, tokens[left_s] = key_with("infer", expires_s=now_s + left_s)
        keys = await keys_of(key, clock=clock_at(lambda: now_s))
        gates[left_s] = Gate(settings_of(SIE_AUTH_MODE="token", **TOKENS), keys)
    assert gates[10.0].check("POST", "/v1/encode/m", f"Bearer {tokens[10.0]}").key
    with pytest.raises(Unauthenticated):
        gates[-10.0].check("POST", "/v1/encode/m", f"Bearer {tokens[-10.0]}")


async def test_a_key_that_expires_waits_for_the_time_of_the_broker() -> None:
    """A key that does not expire is not delayed, and a revoked key is refused as such."""
    clock = BrokerClock(MemoryServer().connect("gateway"), "none")
    lasting, ending = key_with("infer"), key_with("infer", expires_s=time.time() + 60)
    revoked = key_with("infer")
    keys = await keys_of(lasting[0], ending[0], replace(revoked[0], revoked_s=1.0), clock=clock)
    gate = Gate(settings_of(SIE_AUTH_MODE="token", **TOKENS), keys)
    assert isinstance(outcome(gate, "POST", "/v1/encode/m", lasting[1]), Grant)
    assert outcome(gate, "POST", "/v1/encode/m", ending[1]) is NotReady
    assert outcome(gate, "POST", "/v1/encode/m", revoked[1]) is Unauthenticated
    clock.margin_s = 0.1
    assert isinstance(outcome(gate, "POST", "/v1/encode/m", ending[1]), Grant)


@pytest.mark.parametrize(
    "header",
    ["Bearer", "Bearer ", "Basic dXNlcjpwYXNz", "\xff\xfe", "x" * 60_000, "Bearer\t", "null", USER[:-1], USER + "x"],
)
def test_what_is_no_token_is_not_let_in(header: str) -> None:
    gate = Gate(settings_of(SIE_AUTH_MODE="static", **TOKENS))
    with pytest.raises(Unauthenticated) as caught:
        gate.check("GET", "/v1/models", header)
    assert header.strip() not in caught.value.message or header.strip() == "Bearer"


def test_before_the_keys_are_read_an_unknown_token_is_not_yet_wrong() -> None:
    """A gateway that starts must not reject good clients. Static tokens are known at once."""
    gate = Gate(settings_of(SIE_AUTH_MODE="token", **TOKENS), Keys(MemoryServer().connect("gateway"), 1, clock_at()))
    assert outcome(gate, "GET", "/v1/models", "sie_whatever") is NotReady
    assert outcome(gate, "GET", "/v1/models", "") is Unauthenticated
    assert isinstance(outcome(gate, "GET", "/v1/models", USER), Grant)


def test_keys_go_with_the_mode_token_alone(tmp_path: Path) -> None:
    """A process without a broker refuses to start."""
    started = CliRunner().invoke(
        standalone, ["--data-dir", str(tmp_path), "--auth-mode", "token"], env={"SIE_AUTH_MODE": None}
    )
    assert (started.exit_code, "SIE_AUTH_MODE: the mode `token` stores keys in a broker" in started.output) == (2, True)
    keys = Keys(MemoryServer().connect("gateway"), 1, clock_at())
    for settings, key_source in ((settings_of(SIE_AUTH_MODE="token"), None), (settings_of(), keys)):
        with pytest.raises(SettingError, match="SIE_AUTH_MODE"):
            Gate(settings, key_source)


# over HTTP


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[InProcess]:
    async with InProcess(tmp_path) as running:
        yield running


async def statuses(gateway: GatewayProcess, requests: list[tuple[str, str, str]]) -> list[httpx.Response]:
    """Return the responses to requests (method, path, token), twenty at a time."""
    turns = asyncio.Semaphore(20)

    async def one(method: str, path: str, token: str) -> httpx.Response:
        async with turns:
            headers = {"authorization": f"Bearer {token}"} if token else {}
            content = b"{}" if method in ("POST", "PUT", "PATCH") else None
            return await gateway.client.request(method, path, headers=headers, content=content)

    return await asyncio.gather(*(one(*request) for request in requests))


@pytest.mark.parametrize("mode", ["none", "static", "token"])
async def test_over_http_every_route_refuses_who_has_not_its_scope(cluster: InProcess, mode: str) -> None:
    """The credentials are none, a wrong token, a key with this scope alone, a key with all others, and static tokens. A
    refusal is 401 or 403.
    """
    bucket = await records.bucket_of(cluster.server.connect("operator"), 1).open()
    own, rest_tokens = {}, {}
    for scope in SCOPES:
        for tokens, scopes in ((own, (scope,)), (rest_tokens, tuple(name for name in SCOPES if name != scope))):
            key, tokens[scope] = key_with(*scopes)
            await bucket.write([Write(key.id, records.encode(key))])
    gateway = await cluster.gateway(SIE_AUTH_MODE=mode, SIE_GATEWAY_REQUEST_TIMEOUT="2", SIE_LOAD_HOLD_S="0", **TOKENS)
    requests, expected = [], []
    for row, method, path in calls():
        guarded = row.scope != OPEN and (mode != "none" or (row.scope in ("config", "admin") and not row.local))
        has_keys = mode == "token"
        for token, status in (
            ("", 401),
            ("not-a-token", 401),
            *([(own[row.scope], 0), (rest_tokens[row.scope], 403)] if row.scope in SCOPES and has_keys else []),
            *([(USER, 0 if row.scope in (ANY, *USER_SCOPES) else 403), (ADMIN, 0)] if row.scope else []),
        ):
            requests.append((method, path, token))
            expected.append(status if guarded else 0)
    answers = await statuses(gateway, requests)
    for (method, path, token), expected_status, answer in zip(requests, expected, answers, strict=True):
        message = f"{mode}: {method} {path} with {token[:4]!r}: {answer.status_code} {answer.text[:200]}"
        if expected_status:
            assert answer.status_code == expected_status, message
            assert answer.headers.get("www-authenticate") == ("Bearer" if expected_status == 401 else None), message
            assert answer.json()["code"] == ("UNAUTHENTICATED" if expected_status == 401 else "PERMISSION_DENIED"), (
                message
            )
        else:
            assert answer.status_code not in (401, 403, 500), message
        if token:
            assert token not in answer.text, message


async def test_a_handshake_is_refused_plainly_before_it_is_one(cluster: InProcess) -> None:
    gateway = await cluster.gateway(SIE_AUTH_MODE="static", **TOKENS)
    upgrade = {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "c2l4dGVlbiBieXRlcyBvbg==",
    }
    for path in ("/ws/cluster-status", "/ws/status"):
        refused = await gateway.client.get(path, headers=upgrade)
        assert (refused.status_code, refused.json()["code"]) == (401, "UNAUTHENTICATED")
        assert refused.headers["www-authenticate"] == "Bearer"
