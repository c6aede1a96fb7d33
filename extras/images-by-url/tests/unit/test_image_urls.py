"""Images at URLs: the hosts and addresses from which they are fetched, the bounds of a fetch, and its errors."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import socket
import ssl
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from image_items import SEEN, b64, file, post, running
from image_server import PUBLIC, Connections, ImageServer, answer, network
from inprocess import settings_of, until
from public_certificates import certified

from sie_contracts.errors import InvalidInput, PayloadTooLarge, QueueFull
from sie_contracts.wire.messages import Input
from sie_gateway.inference import images
from sie_gateway.inference.body import RequestItem
from sie_images_by_url import fetcher
from sie_images_by_url.fetcher import ImageUrls, Network, is_public

pytestmark = pytest.mark.usefixtures("sample_families")
HOST = "pictures.test"
AT = f"http://{HOST}"
FILE = b"\x89PNG the bytes of a file"


def item(*contents: str | bytes, path: str = "items[0].images") -> RequestItem:
    files, fault, links = images.read(list(contents), path)
    return RequestItem(None, modalities=("image",), images=files, unfit=fault, links=links)


@pytest.fixture
async def server() -> AsyncIterator[ImageServer]:
    async with ImageServer({"/a": answer(FILE)}) as image_server:
        yield image_server


def urls_of(server: ImageServer, *hosts: str, **options: Any) -> tuple[ImageUrls, Connections, list[str]]:
    counted: list[str] = []
    reached, connections = network(server, **options)
    return ImageUrls(hosts or (HOST,), counted.append, reached), connections, counted


async def fetched(urls: ImageUrls, *items: RequestItem, within_s: float = 30.0) -> list[RequestItem]:
    urls.check(items, None)
    async with urls.fetched(items, asyncio.get_running_loop().time() + within_s) as fetched_items:
        assert urls.held.used or any(fetched_item.unfit for fetched_item in fetched_items)
        copies = list(fetched_items)
    assert urls.held.used == 0
    return copies


async def fault(urls: ImageUrls, url: str, **options: Any) -> tuple[str, dict[str, Any]]:
    """Return the fault of the only image of an input, and the limit that the error names."""
    (fetched_item,) = await fetched(urls, item(url), **options)
    assert fetched_item.unfit is not None
    assert (fetched_item.unfit.code, fetched_item.unfit.reason, fetched_item.unfit.param) == (
        "INVALID_INPUT",
        "invalid_media",
        "items[0].images[0]",
    )
    path, _, message = fetched_item.unfit.message.partition(": ")
    assert (path, url in message, HOST in message) == ("items[0].images[0]", False, False)
    return message, fetched_item.unfit.extras


async def test_a_file_at_a_url_is_that_file_and_nothing_of_the_client_is_sent(server: ImageServer) -> None:
    """One request has files and URLs. Each URL is fetched once, from the address that was checked."""
    urls, connections, counted = urls_of(server)
    items = [item(b"first", f"{AT}/a", b"last"), item(f"{AT}/a#part"), item(f"{AT}/a"), RequestItem("a text")]
    fetched_items = await fetched(urls, *items)
    assert [fetched_item.images for fetched_item in fetched_items] == [(b"first", FILE, b"last"), (FILE,), (FILE,), ()]
    assert [(fetched_item.links, fetched_item.unfit) for fetched_item in fetched_items] == [((), None)] * 4
    assert connections.made == [(PUBLIC, 80)] * 2
    assert counted == ["fetched"] * 2
    head = server.asked[0].lower().splitlines()
    assert head[:2] == ["get /a http/1.1", f"host: {HOST}"]
    assert {line.partition(":")[0] for line in head[1:] if line} == {"host", "accept", "accept-encoding", "user-agent"}


async def test_without_the_setting_nothing_is_fetched(server: ImageServer) -> None:
    reached, connections = network(server)
    urls = ImageUrls(None, network=reached)
    with pytest.raises(InvalidInput, match="SIE_IMAGE_URL_HOSTS") as caught:
        urls.check([item(b"x", f"{AT}/a")], None)
    assert (caught.value.reason, caught.value.param) == ("invalid_media", "items[0].images[1]")
    assert connections.made == []


@pytest.mark.parametrize(
    ("listed", "url", "is_listed"),
    [
        (HOST, f"http://{HOST}/a", True),
        (HOST, f"https://{HOST.upper()}:443/a", True),
        (HOST, f"  http://{HOST}./a", True),
        (HOST, f"http://{HOST}:8080/a", False),
        (f"{HOST}:8080", f"http://{HOST}:8080/a", True),
        (f"{HOST}:8080", f"http://{HOST}/a", False),
        (f"*.{HOST}", f"http://eu.{HOST}/a", True),
        (f"*.{HOST}", f"http://{HOST}/a", False),
        (HOST, f"http://{HOST}.evil.test/a", False),
        (HOST, f"http://evil.test\\@{HOST}/a", False),
        (HOST, f"http://{HOST}@evil.test/a", False),
        (HOST, f"http://me:secret@{HOST}/a", False),
        (HOST, f"http://evil.test#@{HOST}/a", False),
        (HOST, f"ftp://{HOST}/a", False),
        (HOST, "file:///etc/passwd", False),
        (HOST, "http:///a", False),
        (HOST, f"http://{HOST}:99999/a", False),
        (HOST, f"http://{HOST}:0/a", False),
        ("*", "https://anything.test:0/a", False),
        (HOST, f"http://{HOST}/{'a' * 9000}", False),
        ("*", "http://anything.test/a", True),
        ("*", "http://anything.test:6379/a", False),
        ("*", "gopher://anything.test/a", False),
        ("[2606:2800::1]", "http://[2606:2800::1]/a", True),
    ],
)
async def test_only_hosts_and_ports_of_the_setting_are_asked(listed: str, url: str, is_listed: bool) -> None:
    """A refused host is never resolved."""
    settings = settings_of(SIE_IMAGE_URL_HOSTS=f"other.test,{listed}")
    urls = ImageUrls(settings.image_url_hosts)
    if is_listed:
        urls.check([item(url)], None)
        return
    with pytest.raises(InvalidInput, match=r"query.images\[0\]: ") as caught:
        urls.check([], item(url, path="query.images"))
    assert caught.value.param == "query.images[0]"
    assert "secret" not in caught.value.message


# all special-purpose addresses in the registries of IANA, then other addresses that are not public
SPECIAL_V4 = """
    0.0.0.0/8 0.0.0.0/32 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 192.0.0.0/29
    192.0.0.8/32 192.0.0.9/32 192.0.0.10/32 192.0.0.170/32 192.0.0.171/32 192.0.2.0/24 192.31.196.0/24 192.52.193.0/24
    192.88.99.0/24 192.88.99.2/32 192.168.0.0/16 192.175.48.0/24 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24
    240.0.0.0/4 255.255.255.255/32
    224.0.0.0/4 168.63.129.16/32 169.254.169.254/32 100.100.100.200/32 192.0.0.192/32
"""
SPECIAL_V6 = """
    ::1/128 ::/128 64:ff9b:1::/48 100::/64 100:0:0:1::/64 2001::/23 2001::/32 2001:1::1/128 2001:1::2/128 2001:1::3/128
    2001:2::/48 2001:3::/32 2001:4:112::/48 2001:10::/28 2001:20::/28 2001:30::/28 2001:db8::/32 2002::/16
    2620:4f:8000::/48 3fff::/20 5f00::/16 fc00::/7 fe80::/10
    ::/96 ::ffff:0:0:0/96 fec0::/10 ff00::/8 fd00:ec2::254/128
"""
PUBLIC_V4 = (PUBLIC, "1.1.1.1", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "126.255.255.255")
PUBLIC_V4 += ("172.15.255.255", "172.32.0.0", "192.0.1.0", "192.88.98.255", "192.88.100.0", "198.17.255.255")
PUBLIC_V4 += ("198.20.0.0", "223.255.255.255")


def carriers(address: str) -> list[str]:
    """Return the IPv6 forms of an IPv4 address that are public if and only if this address is."""
    number = int(ipaddress.IPv4Address(address))
    return [
        str(ipaddress.IPv6Address(int(ipaddress.IPv6Address(prefix)) + number))
        for prefix in ("::ffff:0:0", "64:ff9b::")
    ]


def ends(networks: str) -> list[str]:
    """Return the first, a middle and the last address of each network."""
    ranges = [ipaddress.ip_network(address_range) for address_range in networks.split()]
    return [
        str(address_range[place]) for address_range in ranges for place in (0, address_range.num_addresses // 2, -1)
    ]


def test_every_special_range_is_inside_plain_mapped_and_translated() -> None:
    v4, v6 = ends(SPECIAL_V4), ends(SPECIAL_V6)
    tried = [*v4, *v6, *(form for address in v4 for form in carriers(address)), "fe80::1%eth0"]
    tried += ["localhost", "", "0x7f000001", "2130706433", "127.1", "010.0.0.1"]
    for address in (*v4, *PUBLIC_V4):  # prefixes that are never public, whatever they carry: 6to4, Teredo, local NAT64
        number = int(ipaddress.IPv4Address(address))
        tried += [str(ipaddress.IPv6Address(0x2002 << 112 | number << 80 | 1))]
        tried += [str(ipaddress.IPv6Address(0x20010000 << 96 | number << 64 | number ^ 0xFFFFFFFF))]
        tried += [str(ipaddress.IPv6Address(0x0064FF9B0001 << 80 | number))]
    assert [address for address in tried if is_public(address)] == []


def test_what_lies_beside_the_special_ranges_is_public() -> None:
    tried = [*PUBLIC_V4, *(form for address in PUBLIC_V4 for form in carriers(address))]
    tried += ["2606:2800:220:1::1", "2001:200::1", "2001:db7:ffff::1", "2001:db9::1", "2003::1", "2620:4f:8001::1"]
    tried += ["3ffe:ffff::1", "2a00:1450:4001::8a"]
    assert [address for address in tried if not is_public(address)] == []


@pytest.mark.parametrize("addresses", [["127.0.0.1"], [PUBLIC, "10.0.0.1"], ["::1"]])
async def test_a_name_with_an_address_that_is_not_public_is_not_asked(
    server: ImageServer, addresses: list[str]
) -> None:
    urls, connections, counted = urls_of(server, hosts={HOST: addresses})
    refusal = await fault(urls, f"{AT}/a")
    assert refusal == ("the host of the URL has an address that is not public", {})
    assert (connections.made, server.asked, counted) == ([], [], ["refused"])


async def test_with_the_real_network_nothing_on_this_machine_is_asked(server: ImageServer) -> None:
    """The resolver of this machine turns these names, addresses and numbers into loopback addresses."""
    hosts = ("localhost", "127.0.0.1", "[::1]", "2130706433", "0x7f.1", "0")
    urls = ImageUrls([f"{host}:{server.port}" for host in hosts])
    for host in hosts:
        message, _ = await fault(urls, f"http://{host}:{server.port}/a")
        assert message in (
            "the host of the URL has an address that is not public",
            "the host of the URL has no address",
        )
        assert host == "0x7f.1" or "not public" in message
    assert server.asked == []


async def test_a_name_is_resolved_once_and_the_checked_address_is_connected_to(server: ImageServer) -> None:
    """A second answer of the DNS would be a loopback address."""
    lookups: list[str] = []
    reached, connections = network(server)

    async def resolve(host: str, port: int) -> list[str]:
        lookups.append(host)
        return [PUBLIC] if len(lookups) == 1 else ["127.0.0.1"]

    urls = ImageUrls([HOST], network=Network(resolve, connections, reached.tls))
    assert (await fetched(urls, item(f"{AT}/a")))[0].images == (FILE,)
    assert (lookups, connections.made) == ([HOST], [(PUBLIC, 80)])
    assert await fault(urls, f"{AT}/a") == ("the host of the URL has an address that is not public", {})


async def test_an_abandoned_fetch_occupies_its_slots_until_its_name_is_resolved(
    server: ImageServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A key abandons fetches in all of its slots. Another key is served at once, the first one after its names."""
    go, hosts = threading.Event(), []

    def getaddrinfo(host: str, *_: Any, **__: Any) -> Any:
        hosts.append(host)
        if host == HOST:
            return [(0, 0, 0, "", (PUBLIC, 80))]
        go.wait()
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    reached, connections = network(server)
    urls = ImageUrls(["*"], network=Network(connections=connections, tls=reached.tls))

    async def fetch(*addresses: str, key: str) -> list[RequestItem]:
        async with urls.fetched([item(*addresses)], asyncio.get_running_loop().time() + 30, key) as fetched_items:
            return fetched_items

    try:
        for number in range(fetcher.AT_ONCE_OF_A_KEY // 8):
            fetching = asyncio.create_task(fetch(*(f"http://{number}.{image}.slow/" for image in range(8)), key="slow"))
            await until(lambda count=8 * (number + 1): len(hosts) == count, "the request's names are being resolved")
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)
        waiting = asyncio.create_task(fetch(f"{AT}/a", key="slow"))
        assert (await fetch(f"{AT}/a", key="other"))[0].images == (FILE,)
        assert hosts.count(HOST) == 1
    finally:
        go.set()
    assert (await waiting)[0].images == (FILE,)
    gc.collect()
    assert caplog.messages == []


REDIRECTED = {
    "/elsewhere": "http://other.test/a",
    "/inside": "http://inside.test/a",
    "/port": f"http://{HOST}:8080/a",
    "/file": "file:///etc/passwd",
    "/broken": "http://a:port/",
    "/round": "/round",
}


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/elsewhere", "images are fetched only from hosts and ports that SIE_IMAGE_URL_HOSTS names"),
        ("/inside", "the host of the URL has an address that is not public"),
        ("/port", "images are fetched only from hosts and ports that SIE_IMAGE_URL_HOSTS names"),
        ("/file", "the URL has a scheme other than http and https"),
        ("/broken", "the URL leads to a redirect that is not valid"),
        ("/round", "the URL leads to more than 3 redirects"),
    ],
)
async def test_each_redirect_is_checked_like_the_first_url(server: ImageServer, path: str, message: str) -> None:
    server.answers |= {name: answer(status=302, location=place) for name, place in REDIRECTED.items()}
    urls, connections, _ = urls_of(server, HOST, "inside.test", hosts={"inside.test": ["10.0.0.7"]})
    fault_message, extras = await fault(urls, AT + path)
    assert fault_message == message
    assert extras == ({"limit": 3} if path == "/round" else {})
    assert {address for address, _ in connections.made} == {PUBLIC}
    assert all(f"host: {HOST}\r\n" in head.lower() for head in server.asked)


async def test_a_redirect_to_another_listed_host_is_followed(server: ImageServer) -> None:
    server.answers |= {"/r": answer(status=307, location="//eu.pictures.test/b"), "/b": answer(b"b")}
    urls, connections, _ = urls_of(server, HOST, f"*.{HOST}", hosts={f"eu.{HOST}": ["1.1.1.1"]})
    assert (await fetched(urls, item(f"{AT}/r")))[0].images == (b"b",)
    assert connections.made == [(PUBLIC, 80), ("1.1.1.1", 80)]


async def test_an_image_has_bounds_of_size(server: ImageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher, "MAX_BYTES", 1000)
    server.answers |= {
        "/most": answer(bytes(1000)),
        "/told": answer(content_length="1001"),
        "/endless": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + (b"200\r\n" + bytes(512) + b"\r\n") * 9,
        "/unknown": b"HTTP/1.1 200 OK\r\n\r\n" + bytes(5000),
    }
    urls, _, counted = urls_of(server)
    assert (await fetched(urls, item(f"{AT}/most")))[0].images == (bytes(1000),)
    for path in ("/told", "/endless", "/unknown"):
        refusal = await fault(urls, AT + path)
        assert refusal == ("the image has more than 1000 bytes, the limit of a fetched image", {"limit": 1000})
    assert counted == ["fetched", "refused", "refused", "refused"]


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (
            b"HTTP/1.1 100 Continue\r\n\r\n" * 100_000 + answer(FILE),
            "the head of the server's answer has more than 65536",
        ),
        (b"HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n" * 100_000 + answer(FILE), "the head of the server's answer"),
        (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 50_000, "the head of the server's answer has more than 65536"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 100_000 + b"0\r\n\r\n",
            "the server of the URL sent pieces of less than 64 bytes",
        ),
    ],
    ids=["interim answers", "early hints", "headers", "chunks"],
)
async def test_an_answer_in_very_small_pieces_is_given_up(server: ImageServer, sent: bytes, message: str) -> None:
    """Each piece takes time of the event loop, in which no other request proceeds."""
    server.answers["/small"] = sent
    urls, _, counted = urls_of(server)
    assert (await fault(urls, f"{AT}/small"))[0].startswith(message)
    assert counted == ["failed"]
    server.answers["/chunks"] = (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        + (b"80\r\n" + bytes(128) + b"\r\n") * 20_000
        + b"0\r\n\r\n"
    )
    assert (await fetched(urls, item(f"{AT}/chunks")))[0].images == (bytes(128 * 20_000),)


async def test_an_image_has_a_bound_of_time(server: ImageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the image of a server that never answers fails. The other images of the request are fetched."""
    monkeypatch.setattr(fetcher, "MAX_S", 1)
    server.answers["/slow"] = answer(b"x", content_length="100")
    urls, _, counted = urls_of(server)
    fetched_items = await fetched(urls, item(f"{AT}/never"), item(f"{AT}/a"))
    assert fetched_items[0].unfit is not None
    assert fetched_items[0].unfit.message == "items[0].images[0]: the image was not complete within 1 s"
    assert fetched_items[0].unfit.extras == {"limit": 1}
    assert (fetched_items[1].images, sorted(counted)) == ((FILE,), ["failed", "fetched"])
    monkeypatch.setattr(fetcher, "MAX_S", 60)
    message, _ = await fault(urls, f"{AT}/never", within_s=0.2)
    assert message == "the image was not complete within the budget of the request"


async def test_a_key_whose_servers_never_answer_leaves_slots_to_other_keys(server: ImageServer) -> None:
    """The key has more requests and URLs than slots. Its fetches wait for each other, not those of another key."""
    urls, _, _ = urls_of(server)

    async def fetch(*paths: str, key: str) -> list[RequestItem]:
        items = [item(*(f"{AT}{path}" for path in paths))]
        async with urls.fetched(items, asyncio.get_running_loop().time() + 30, key) as fetched_items:
            return fetched_items

    slow = [
        asyncio.create_task(fetch(*(f"/never/{number}/{image}" for image in range(16)), key="slow"))
        for number in range(fetcher.AT_ONCE // 4)
    ]
    await until(lambda: len(server.asked) == fetcher.AT_ONCE_OF_A_KEY, "the key has all of its slots")
    async with asyncio.timeout(5):
        (fetched_item,) = await fetch("/a", key="other")
    assert fetched_item.images == (FILE,)
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (answer(b"x", 404), "the server of the URL answered 404, expected 200"),
        (answer(b"x", 500), "the server of the URL answered 500, expected 200"),
        (answer(b"", 200), "the server of the URL sent nothing"),
        (
            answer(b"x", content_encoding="gzip"),
            "the server of the URL sent a compressed answer, which was not asked for",
        ),
        (answer(b"x", content_length="5"), "the server of the URL sent no complete answer"),
        (b"no HTTP at all\r\n\r\n", "the server of the URL sent no complete answer"),
        (b"", "the server of the URL sent no complete answer"),
    ],
)
async def test_a_server_that_fails_costs_its_own_image(server: ImageServer, sent: bytes, message: str) -> None:
    server.answers["/odd"] = sent
    urls, _, counted = urls_of(server)
    assert await fault(urls, f"{AT}/odd") == (message, {})
    assert counted == ["failed"]
    nowhere, _, _ = urls_of(server, hosts={HOST: []})
    assert await fault(nowhere, f"{AT}/a") == ("the host of the URL has no address", {})
    away, _, _ = urls_of(server, dead=[PUBLIC])
    assert await fault(away, f"{AT}/a") == ("the server of the URL cannot be reached", {})


async def test_a_request_has_bounds_of_urls_and_bytes(server: ImageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    urls, _, _ = urls_of(server)
    many = [item(*(f"{AT}/{number}" for number in range(50)), path=f"items[{index}].images") for index in range(6)]
    with pytest.raises(InvalidInput, match="has 300 URLs of images, at most 256 are fetched") as caught:
        urls.check(many, None)
    assert (caught.value.param, caught.value.extras) == ("items[5].images[6]", {"limit": 256})
    server.answers |= {f"/{number}": answer(bytes(100)) for number in range(50)}
    monkeypatch.setattr(fetcher, "MAX_REQUEST_BYTES", 4000)
    with pytest.raises(PayloadTooLarge, match="more than 4000 bytes in all") as large:
        await fetched(urls, many[0])
    assert (large.value.param, large.value.extras) == ("items", {"limit": 4000})
    assert urls.held.used == 0
    monkeypatch.setattr(fetcher, "MAX_REQUEST_BYTES", 5000)
    assert len((await fetched(urls, many[0]))[0].images) == 50
    with pytest.raises(PayloadTooLarge):  # each use counts, as if the client had sent the file
        await fetched(urls, many[0], item(f"{AT}/1"))
    urls.held.total = 4000
    async with urls.fetched([item(f"{AT}/1")], asyncio.get_running_loop().time() + 10):
        with pytest.raises(QueueFull):
            await fetched(urls, item(*(f"{AT}/{number}" for number in range(50))))
    assert urls.held.used == 0


async def test_images_of_one_key_leave_memory_to_other_keys(server: ImageServer) -> None:
    urls, _, _ = urls_of(server)
    urls.held.total = 8000
    server.answers |= {"/large": answer(bytes(6900)), "/small": answer(bytes(500))}
    until_s = asyncio.get_running_loop().time() + 10
    async with urls.fetched([item(f"{AT}/large")], until_s, "bulk"):
        with pytest.raises(QueueFull):
            async with urls.fetched([item(f"{AT}/large")], until_s, "other"):
                pass
        with pytest.raises(QueueFull):
            async with urls.fetched([item(f"{AT}/small")], until_s, "bulk"):
                pass
        async with urls.fetched([item(f"{AT}/small")], until_s, "other"):
            assert urls.held.used_by == {"bulk": 6900, "other": 500}
    assert urls.held.used == 0


async def test_tls_verifies_the_name_of_the_url_and_not_the_address(tmp_path: Path) -> None:
    """The certificate is for one name. A URL with this name is fetched, a URL with another name at the same address is
    not.
    """
    certificate = certified(tmp_path, HOST)
    own = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    own.load_cert_chain(certificate)
    trusted = ssl.create_default_context(cafile=str(certificate))
    server = await ImageServer({"/a": answer(FILE)}).start(own)
    try:
        urls, connections, _ = urls_of(server, HOST, "other.test", tls=trusted)
        assert (await fetched(urls, item(f"https://{HOST}/a")))[0].images == (FILE,)
        assert await fault(urls, "https://other.test/a") == ("the server of the URL cannot be reached", {})
        assert connections.made == [(PUBLIC, 443)] * 2
        strangers, _, _ = urls_of(server)
        assert (await fault(strangers, f"https://{HOST}/a"))[0] == "the server of the URL cannot be reached"
    finally:
        await server.stop()


# through a gateway, to the work item


A, B = file("PNG"), file("JPEG", size=(8, 2))
PARTS = [
    {"type": "text", "text": "one"},
    {"type": "image_url", "image_url": {"url": f"{AT}/a"}},
    {"type": "image_url", "image_url": f"{AT}/b"},
]
ROUTES: list[tuple[str, dict[str, Any], list[Input]]] = [
    (f"/v1/encode/{SEEN}", {"items": ["a", {"images": [f"{AT}/a", b64(B)]}]}, [Input("a"), Input(images=(A, B))]),
    (
        "/v1/embeddings",
        {"input": [f"{AT}/a", f"{AT}/b"], "modality": "image"},
        [Input(images=(A,)), Input(images=(B,))],
    ),
    ("/v1/embeddings", {"input": [{"text": "a", "image": f"{AT}/a"}]}, [Input("a", images=(A,))]),
    ("/v1/embeddings", {"input": [{"content": PARTS}]}, [Input("one", images=(A, B))]),
    (
        "/v1/rerank",
        {"query": "q", "documents": ["a", {"text": "b", "image": f"{AT}/b"}]},
        [Input("a"), Input("b", images=(B,))],
    ),
]


async def test_a_url_of_a_listed_host_is_its_file_on_every_route(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIE_IMAGE_URL_HOSTS: the work items are equal to those of the files."""
    async with ImageServer({"/a": answer(A), "/b": answer(B)}) as server:
        reached, _ = network(server, {"inside.test": ["10.0.0.1"]})
        monkeypatch.setattr(fetcher, "NETWORK", reached)
        async with running(tmp_path, SIE_IMAGE_URL_HOSTS=f"{HOST},inside.test") as (gateway, worker):
            for path, body, expected in ROUTES:
                worker.items.clear()
                reply = await post(gateway, path, {"model": "toy/shown" if "rerank" in path else SEEN, **body})
                assert reply.status_code == 200, (path, reply.text)
                assert worker.inputs == expected, path
            worker.items.clear()
            mixed = {"items": [{"images": [f"{AT}/a", "http://inside.test/a"]}, {"images": [b64(B), f"{AT}/a"]}]}
            bad, good = (await post(gateway, f"/v1/encode/{SEEN}", mixed)).json()["items"]
            assert (bad["error"]["reason"], "dense" in good) == ("invalid_media", True)
            assert bad["error"]["message"].startswith("items[0].images[1]: ")
            assert worker.inputs == [Input(images=(B, A))]
            before = len(server.asked)
            refused = await post(gateway, "/v1/encode/toy/one", {"items": [{"images": [f"{AT}/a"]}]})
            assert refused.json()["error"]["reason"] == "unsupported_modality"
            assert len(server.asked) == before
            query: dict[str, Any] = {"query": {"images": [f"{AT}/a"]}, "items": ["a", {"images": [f"{AT}/b"]}]}
            assert (await post(gateway, "/v1/score/toy/shown", query)).status_code == 200
            assert worker.items[-1].query == Input(images=(A,))
            query["query"] = {"images": ["http://inside.test/a"]}
            error = (await post(gateway, "/v1/score/toy/shown", query)).json()["error"]
            assert (error["reason"], error["param"]) == ("invalid_media", "query.images[0]")
            assert await gateway.metric("sie_gateway_image_fetches_total", result="refused") == 2
            assert await gateway.metric("sie_gateway_image_fetches_total", result="fetched") == len(server.asked)
            monkeypatch.setattr(fetcher, "MAX_REQUEST_BYTES", 10)
            large = await post(gateway, "/v1/embeddings", {"model": SEEN, "input": [{"image": f"{AT}/a"}]})
            assert (large.status_code, large.json()["error"]["param"]) == (413, "input")
