"""Host names that a listener answers to, and pages that may change or compute something there: at every listener of
every process.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
from inprocess import InProcess, settings_of, until
from prometheus_client.parser import text_string_to_metric_families

import sie_config_service.process
from sie_broker import BrokerUnavailable
from sie_contracts.errors import PermissionDenied
from sie_runtime.http.protocol import HostNames
from sie_runtime.http.refusals import REFUSED
from sie_runtime.process import Stop

LOOPBACK, CLUSTER = "127.0.0.1", "0.0.0.0"
LISTED = ("sie.example.com", "*.example.org", "port.example.com:8443")


def refused(names: HostNames, host: str | None, *headers: tuple[str, str], method: str | None = "POST") -> str:
    """Return the reason of the refusal, or an empty string. Method None is a websocket."""
    pairs = [*([("host", host)] if host is not None else []), *headers]
    scope = {
        "type": "http" if method else "websocket",
        "method": method,
        "headers": [(name.encode(), value.encode()) for name, value in pairs],
    }
    try:
        names.check(scope)
    except PermissionDenied as error:
        return error.reason
    return ""


OWN_NAMES = "localhost LOCALHOST:8080 localhost. a.localhost 127.0.0.1:1 127.9.9.9 [::1]:8080"
FOREIGN = (
    "evil.com evil.com:8080 localhost.evil.com 127.0.0.1.evil.com 10.0.0.1 gateway evil.com. xlocalhost [::2] evil.svc"
)
OF_LIST = "sie.example.com SIE.example.com:80 a.example.org a.b.example.org:1 port.example.com:8443 10.0.0.1 gateway"
OF_CLUSTER = "sie-gateway.search.svc sie-gateway.search.svc.cluster.local:8080 localhost [fd00::1]"
NOT_OF_LIST = (
    "evil.com example.org port.example.com port.example.com:80 xexample.org sie.example.com.evil.com svc.evil.com"
)


@pytest.mark.parametrize(
    ("address", "allowed", "hosts", "is_own"),
    [
        (LOOPBACK, None, (*OWN_NAMES.split(), socket.gethostname(), "", None), True),
        (LOOPBACK, None, FOREIGN.split(), False),
        ("::1", None, ["evil.com"], False),
        ("localhost", None, ["evil.com"], False),
        (CLUSTER, None, ["evil.com", "gateway", "10.0.0.1:8080"], True),
        (CLUSTER, LISTED, f"{OF_LIST} {OF_CLUSTER}".split(), True),
        (CLUSTER, LISTED, NOT_OF_LIST.split(), False),
        (LOOPBACK, LISTED, ["sie.example.com"], True),
        (LOOPBACK, LISTED, ["evil.com", "gateway"], False),
        (LOOPBACK, ("*",), ["evil.com"], True),
    ],
    ids=range(10),
)
def test_a_listener_answers_to_its_own_names_and_those_that_are_listed(
    address: str, allowed: tuple[str, ...] | None, hosts: Sequence[str | None], is_own: bool
) -> None:
    for host, method in itertools.product(hosts, ("GET", "POST", None)):
        assert refused(HostNames(address, allowed), host, method=method) == ("" if is_own else "host"), host


OWN = "localhost:8080"
FOREIGN_PAGES = f"""
    http://evil.com null http://localhost http://localhost:3000 http://127.0.0.1:8080 chrome-extension://abc
    http://evil.com/{OWN} http://{OWN}@evil.com file://{OWN} http://[ http://{OWN}.evil.com
"""


@pytest.mark.parametrize(
    ("headers", "is_let_in"),
    [
        ([], True),  # curl, and every other client that is no browser
        ([("origin", f"http://{OWN}")], True),
        ([("origin", f"https://{OWN.upper()}")], True),
        ([("origin", f"http://{OWN}"), ("sec-fetch-site", "same-origin")], True),
        *(([("sec-fetch-site", site)], True) for site in ("none", "same-origin")),
        *(([("sec-fetch-site", site)], False) for site in ("cross-site", "same-site")),
        *(([("origin", origin)], False) for origin in (*FOREIGN_PAGES.split(), "")),
        ([("origin", "http://evil.com"), ("sec-fetch-site", "same-origin")], False),
    ],
)
def test_only_its_own_pages_may_change_and_compute(headers: list[tuple[str, str]], is_let_in: bool) -> None:
    names = HostNames(LOOPBACK, None)
    for method in ("POST", "PUT", "PATCH", "DELETE", "QUERY", None):
        assert refused(names, OWN, *headers, method=method) == ("" if is_let_in else "origin"), method
    for method in ("GET", "HEAD", "OPTIONS"):
        assert not refused(names, OWN, *headers, method=method), "no page sees the answer"


def test_pages_of_listed_hosts_may_and_a_star_lists_no_page() -> None:
    def of(allowed: tuple[str, ...], origin: str) -> str:
        return refused(HostNames(CLUSTER, allowed), "internal.example.com", ("origin", origin))

    assert of(("internal.example.com", "sie.example.com"), "https://sie.example.com") == ""
    assert of(("internal.example.com", "sie.example.com"), "https://evil.com") == "origin"
    assert of(("*",), "https://evil.com") == "origin"


async def refusals_of(client: httpx.AsyncClient, url: str, name: str) -> dict[str, float]:
    """Return the counts of the process, by the reason: one series for each, whatever was sent."""
    families = text_string_to_metric_families((await client.get(f"{url}/metrics")).text)
    return {
        sample.labels["reason"]: sample.value for family in families for sample in family.samples if sample.name == name
    }


async def nobody(*_: object, **__: object) -> None:
    """Fail as a connection to a broker that is away."""
    raise BrokerUnavailable("nobody listens")


@pytest.mark.parametrize(
    "listed", ["", pytest.param("sie.example.com", marks=pytest.mark.long)], ids=["unset", "listed"]
)
async def test_every_listener_checks_the_names_that_the_setting_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: str
) -> None:
    """SIE_ALLOWED_HOSTS: the API, the metrics port, the worker and the config service refuse a foreign Host and a
    foreign page.
    """
    environ = {"SIE_ALLOWED_HOSTS": listed} if listed else {}
    monkeypatch.setattr("sie_broker.nats.connect", nobody)
    stop = Stop()
    listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    settings = settings_of(**environ, SIE_NATS_URL="nats://broker")
    serving = sie_config_service.process.run(settings, stop, host=LOOPBACK, port=0, on_listening=listening.set_result)
    config = asyncio.create_task(serving)
    try:
        async with InProcess(tmp_path) as cluster, httpx.AsyncClient(trust_env=False, timeout=30) as client:
            gateway, sidecar = await cluster.gateway(**environ), await cluster.sidecar(**environ)
            config_url = f"http://{LOOPBACK}:{await listening}"
            for url in (gateway.url, gateway.side_url, sidecar.side_url, config_url):

                async def ask(method: str = "GET", url: str = url, **headers: str) -> httpx.Response:
                    names = {name.replace("_", "-"): value for name, value in headers.items()}
                    return await client.request(method, f"{url}/healthz", headers=names)

                assert (await ask()).status_code == 200
                assert (await ask(host="localhost")).status_code == 200
                answer = await ask(host="evil.com")
                assert (answer.status_code, answer.json()["error"]["reason"]) == (403, "host")
                assert "SIE_ALLOWED_HOSTS" in answer.json()["error"]["message"]
                assert "evil" not in answer.text
                assert (await ask(host="sie.example.com")).status_code == (200 if listed else 403)
                answer = await ask("POST", origin="http://evil.com")
                assert (answer.status_code, answer.json()["error"]["reason"]) == (403, "origin")
                assert (await ask("POST", sec_fetch_site="cross-site")).status_code == 403
                for method in ("POST", "PUT", "DELETE", "TRACE"):
                    answer = await ask(method)
                    allowed = answer.headers["allow"], answer.json()["code"]
                    assert (answer.status_code, *allowed) == (405, "GET, HEAD, OPTIONS", "METHOD_NOT_ALLOWED"), url
                answer = await ask("OPTIONS")
                assert (answer.status_code, answer.headers["allow"]) == (204, "GET, HEAD, OPTIONS")
                assert "content-length" not in answer.headers, "RFC 9110, 8.6: 204 has no length"
                answer = await ask("HEAD")
                assert (answer.status_code, answer.headers["content-length"], answer.content) == (200, "2", b"")
            by_host = 1 if listed else 2
            for url, prefix, listeners in (
                (gateway.side_url, "sie_gateway", 2),
                (sidecar.side_url, "sie", 1),
                (config_url, "sie_config", 1),
            ):
                counted = await refusals_of(client, url, f"{prefix}_refused_below_routes_total")
                assert counted == {**dict.fromkeys(REFUSED, 0), "host": by_host * listeners, "origin": 2 * listeners}, (
                    url
                )
    finally:
        stop.request()
        await until(config.done, "the end of the config service")
        config.result()


async def test_pages_of_listed_origins_read_answers(tmp_path: Path) -> None:
    """SIE_CORS_ORIGINS, with tokens: a page that is not listed gets no CORS header, and no page gets one at the metrics
    port.
    """
    page, foreign = "https://search.example.com", "https://search.example.com.evil.com"
    readable = "access-control-allow-origin"
    async with InProcess(tmp_path) as cluster, httpx.AsyncClient(trust_env=False, timeout=30) as client:
        gateway = await cluster.gateway(
            SIE_CORS_ORIGINS=page, SIE_AUTH_MODE="static", SIE_AUTH_TOKEN="secret", SIE_ADMIN_TOKEN="root"
        )
        url = f"{gateway.url}/v1/pools"
        preflight = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type,x-sie-explain",
        }
        answer = await client.options(url, headers={"origin": page, **preflight})  # a preflight has no token
        assert (answer.status_code, answer.headers[readable]) == (200, page)
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert {*preflight["access-control-request-headers"].split(",")} <= {
            name.strip() for name in answer.headers["access-control-allow-headers"].split(",")
        }
        answer = await client.options(url, headers={"origin": foreign, **preflight})
        assert (answer.status_code, answer.headers.get(readable)) == (400, None)
        key = {"authorization": "Bearer secret"}
        answer = await client.get(url, headers={"origin": page, **key})
        assert (answer.status_code, answer.headers[readable]) == (200, page)
        assert "access-control-allow-credentials" not in answer.headers
        answer = await client.get(url, headers={"origin": page})  # a page can read why its request failed
        assert (answer.status_code, answer.headers[readable]) == (401, page)
        answer = await client.get(url, headers={"origin": foreign, **key})
        assert (answer.status_code, answer.headers.get(readable)) == (200, None)
        answer = await client.post(url, headers={"origin": page, **key}, content=b"{")
        assert (answer.status_code, answer.headers[readable]) == (400, page)
        answer = await client.post(url, headers={"origin": foreign, **key}, content=b"{")
        assert (answer.status_code, answer.json()["error"]["reason"]) == (403, "origin")
        assert readable not in answer.headers
        answer = await client.get(f"{gateway.side_url}/metrics", headers={"origin": page})
        assert (answer.status_code, answer.headers.get(readable)) == (200, None)


async def test_options_tells_what_a_path_takes(tmp_path: Path) -> None:
    async with InProcess(tmp_path) as cluster, httpx.AsyncClient(trust_env=False, timeout=30) as client:
        gateway = await cluster.gateway()
        for path, allowed in (
            ("/v1/pools", {"GET", "HEAD", "POST", "OPTIONS"}),
            ("/v1/encode/a/b", {"POST", "OPTIONS"}),
            ("/health", {"GET", "HEAD", "OPTIONS"}),
        ):
            answer = await client.options(gateway.url + path, headers={"origin": "https://evil.com"})
            assert (answer.status_code, answer.content) == (204, b"")
            assert {*answer.headers["allow"].split(", ")} == allowed
            assert "access-control-allow-origin" not in answer.headers
        assert (await client.options(gateway.url + "/nothing")).status_code == 404
