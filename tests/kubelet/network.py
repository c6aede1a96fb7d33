"""The network of a cluster: a namespace and an address for each pod, an address for each service that leads to a ready
pod, and the rendered NetworkPolicies as nftables of the node.

The thread that enters `Network.joined` moves into the network namespace of the node. Threads and processes that it
starts are in this namespace too, and reach every pod, as a kubelet does. A pod has routes only to pods and services.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from helm import Object, matches, of_kind

CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
GATEWAY = "10.77.255.254"  # the node, which is the gateway of every pod
PODS, SERVICES = "10.77", "10.78"
CLUSTER = "10.76.0.0/14"
Outcome = Literal["open", "closed", "refused", "silent"]
_NAMESPACES = Path("/run/netns")
_LIBC = ctypes.CDLL(None, use_errno=True)
_OUTCOMES: Mapping[int, Outcome] = {errno.ECONNREFUSED: "closed", errno.EHOSTUNREACH: "refused"}
_SELECTOR = {"matchLabels"}
_NEWLINE = "\n"  # before Python 3.12 an expression in an f-string may have no backslash


@contextlib.contextmanager
def namespace(kind: int, name: str) -> Iterator[None]:
    """Move this thread, or for CLONE_NEWPID its children, into a new namespace until the block ends."""
    with _back_after(name):
        if _LIBC.unshare(kind):
            raise OSError(ctypes.get_errno(), f"no {name} namespace may be made here")
        yield


@contextlib.contextmanager
def inside(name: str) -> Iterator[None]:
    """Move this thread into the network of a pod until the block ends."""
    with _back_after("net"), (_NAMESPACES / name).open() as there:
        assert _LIBC.setns(there.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        yield


@contextlib.contextmanager
def _back_after(name: str) -> Iterator[None]:
    before = os.open(f"/proc/thread-self/ns/{name}", os.O_RDONLY)
    try:
        try:
            yield
        finally:
            assert _LIBC.setns(before, 0) == 0
    finally:
        os.close(before)


def ip(*arguments: str) -> None:
    run(["ip", *arguments])


def run(argv: Sequence[str], text: str = "") -> str:
    done = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr}\n{text}"
    return done.stdout


@dataclass(frozen=True)
class Member:
    """A pod as others of the network see it. `namespace` is that of Kubernetes."""

    address: str
    namespace: str
    labels: Mapping[str, str]


@dataclass(frozen=True)
class Endpoint:
    """A port of a service, and the pods behind it."""

    address: str
    port: int
    targets: Sequence[tuple[str, int]]


@dataclass
class Network:
    """The network of one node, which exists within `joined`."""

    prefix: str
    _numbers: int = field(default=0, init=False)

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        with namespace(CLONE_NEWNET, "net"):
            ip("link", "set", "lo", "up")
            Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
            # addresses of services need a route before nftables replaces them
            ip("link", "add", "services", "type", "veth", "peer", "name", "sink")
            ip("address", "add", f"{GATEWAY}/32", "dev", "services")
            for link in ("services", "sink"):
                ip("link", "set", link, "up")
            ip("route", "add", f"{SERVICES}.0.0/16", "dev", "services", "src", GATEWAY)
            yield

    def join(self) -> tuple[str, str]:
        """Create a namespace for a pod. Return its name and the address of the pod."""
        self._numbers += 1
        number = self._numbers
        name, link, address = f"{self.prefix}{number}", f"pod{number}", f"{PODS}.{number // 250}.{number % 250 + 1}"
        ip("netns", "add", name)
        ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("address", "add", f"{GATEWAY}/32", "dev", link)
        ip("link", "set", link, "up")
        ip("route", "add", f"{address}/32", "dev", link)
        for words in (
            ("address", "add", f"{address}/32", "dev", "eth0"),
            ("link", "set", "lo", "up"),
            ("link", "set", "eth0", "up"),
            ("route", "add", GATEWAY, "dev", "eth0", "scope", "link"),
            ("route", "add", CLUSTER, "via", GATEWAY),
        ):
            ip("-n", name, *words)
        return name, address

    def leave(self, name: str) -> None:
        ip("netns", "delete", name)

    def lead(self, endpoints: Sequence[Endpoint]) -> None:
        """Let the addresses of services lead to these pods from the next connection on."""
        run(["nft", "-f", "-"], services(endpoints))

    def obey(self, manifests: Sequence[Object], members: Sequence[Member], own: str) -> None:
        """Apply the policies of the namespace `own` to these pods from the next connection on."""
        run(["nft", "-f", "-"], policies(manifests, members, own))

    def refused(self) -> dict[str, int]:
        """Return the number of refused packets by chain, which names a direction and the address of a pod."""
        lines = run(["nft", "list", "table", "inet", "policies"]).splitlines()
        counts: dict[str, int] = {}
        chain = ""
        for line in map(str.strip, lines):
            if line.startswith("chain "):
                chain = line.split()[1]
            elif line.startswith("counter packets") and "reject" in line:
                counts[chain] = int(line.split()[2])
        return counts


def swept(prefix: str) -> None:
    """Delete the namespaces with a prefix, which a killed process of tests may have left."""
    for path in _NAMESPACES.glob(f"{prefix}*"):
        ip("netns", "delete", path.name)


def owners(prefix: str) -> set[int]:
    """Return the ids of the processes that have namespaces with this prefix."""
    return {int(path.name.removeprefix(prefix).split("-")[0]) for path in _NAMESPACES.glob(f"{prefix}*")}


def services(endpoints: Sequence[Endpoint]) -> str:
    """Return rules like those of kube-proxy: a connection to a service goes to a random pod of it, or is refused if it
    has none. A connection of a pod to itself does not work, and no part of the chart needs it.
    """
    to, none = [], []
    for endpoint in endpoints:
        where = f"ip daddr {endpoint.address} tcp dport {endpoint.port}"
        if endpoint.targets:
            pairs = ", ".join(f"{number} : {at} . {port}" for number, (at, port) in enumerate(endpoint.targets))
            to.append(f"{where} dnat ip to numgen random mod {len(endpoint.targets)} map {{ {pairs} }}")
        else:
            none.append(f"{where} reject with tcp reset")
    chains = {
        "to": to,
        "routed": ["type nat hook prerouting priority -100; policy accept;", "jump to"],
        "made_here": ["type nat hook output priority -100; policy accept;", "jump to"],
        "forwarded": ["type filter hook forward priority -1; policy accept;", *none],
        "sent": ["type filter hook output priority 0; policy accept;", *none],
    }
    return _table("ip services", chains)


def policies(manifests: Sequence[Object], members: Sequence[Member], own: str) -> str:
    """Return rules with a chain for each pod and direction that a policy selects. Each chain ends in a refusal."""
    specs = [manifest["spec"] for manifest in of_kind("NetworkPolicy", list(manifests)).values()]
    chains: dict[str, list[str]] = {}
    jumps = ["ct state established,related accept"]
    for member in members:
        for direction, key, side, peer_side in (
            ("Egress", "to", "saddr", "daddr"),
            ("Ingress", "from", "daddr", "saddr"),
        ):
            selecting = [
                spec
                for spec in specs
                if member.namespace == own
                and direction in spec["policyTypes"]
                and matches({"podSelector": _selector(spec["podSelector"])}, dict(member.labels))
            ]
            if not selecting:
                continue
            name = f"{direction.lower()}_{member.address}"
            chains[name] = [
                line
                for spec in selecting
                for rule in spec.get(direction.lower(), ())
                for line in _lines(rule, key, peer_side, members, own)
            ]
            chains[name].append("counter reject with icmpx type admin-prohibited")
            jumps.append(f"ip {side} {member.address} jump {name}")
    chains["forward"] = ["type filter hook forward priority 0; policy accept;", *jumps]
    return _table("inet policies", chains)


def _table(name: str, chains: Mapping[str, Sequence[str]]) -> str:
    """Return text that replaces a table in one transaction."""
    text = "".join(f"chain {chain} {{\n{_NEWLINE.join(lines)}\n}}\n" for chain, lines in chains.items())
    return f"table {name}\ndelete table {name}\ntable {name} {{\n{text}}}\n"


def _selector(selector: Object) -> Object:
    assert selector.keys() <= _SELECTOR, f"a selector of more than labels: {selector}"
    return selector


def _lines(rule: Object, key: str, side: str, members: Sequence[Member], own: str) -> Iterator[str]:
    assert rule.keys() <= {key, "ports"}, f"a rule of more than peers and ports: {rule}"
    condition = ""
    if key in rule:
        addresses = sorted({member.address for member in members for peer in rule[key] if _is(peer, member, own)})
        if not addresses:
            return
        condition = f"ip {side} {{ {', '.join(addresses)} }} "
    if "ports" not in rule:
        yield f"{condition}return"
    for port in rule.get("ports", ()):
        assert port.keys() <= {"port", "protocol"}, f"a port of more than a number: {port}"
        assert isinstance(port["port"], int), f"a port by name: {port}"
        yield f"{condition}{port.get('protocol', 'TCP').lower()} dport {port['port']} return"


def _is(peer: Object, member: Member, own: str) -> bool:
    assert peer.keys() <= {"podSelector", "namespaceSelector"}, f"a peer of more than selectors: {peer}"
    if "namespaceSelector" in peer:
        labels = _selector(peer["namespaceSelector"]).get("matchLabels", {})
        if not labels.items() <= {"kubernetes.io/metadata.name": member.namespace}.items():
            return False
    elif member.namespace != own:
        return False
    return matches({"podSelector": _selector(peer.get("podSelector", {}))}, dict(member.labels))


def tried(name: str, address: str, port: int, timeout_s: float = 3.0) -> Outcome:
    """Return the outcome of a connection out of a pod's network."""
    with inside(name), socket.socket() as wire:
        wire.settimeout(timeout_s)
        try:
            wire.connect((address, port))
        except TimeoutError:
            return "silent"
        except OSError as error:
            outcome = _OUTCOMES.get(error.errno or 0)
            if outcome is None:
                raise
            return outcome
        return "open"
