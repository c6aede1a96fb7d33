"""Cluster of a command: the addresses of its processes, the credentials for them, and the advice if no cluster runs.

    --url ► --data-dir ► environment ► the `sie serve` of this user ──► Cluster ──► broker, gateway, config service

For each process, a command uses the first of these sources that has an address. A command sends the credentials of a
`sie serve` only to the addresses of this `sie serve`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import shlex
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from sie_cli import access
from sie_cli.access import Access, as_operator
from sie_cli.data_dir import default_data_dir
from sie_cli.options import DATA_DIR, loaded, named_options, refuse, url_option
from sie_cli.refusal import refusing
from sie_contracts import client_environment
from sie_contracts.loopback import cause_of, is_local, is_refused
from sie_contracts.settings import BY_NAME, Loaded, Secret, SettingError, Settings, public_url

if TYPE_CHECKING:
    from sie_broker.nats import NatsBroker

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
CONNECT_S = 5.0  # seconds after which an attempt to connect to the broker fails
FIRST_S = 5.0  # seconds in which a command retries its first connection to a gateway
# value in `Cluster.sources` for an address or credential that a `sie serve` wrote to its data directory
SOURCE = "data directory"
GATEWAY = client_environment.LOOPBACK  # gateway address if no source has one
BROKER_URL, CONFIG_URL, GATEWAY_URL = "SIE_NATS_URL", "SIE_CONFIG_SERVICE_URL", "SIE_GATEWAY_URL"


@dataclass(frozen=True)
class _ClusterPart:
    """Process of a cluster. `field` and `local`: names of the fields with the process's address, in `Settings` and in
    `Access`.
    """

    name: str
    field: str
    local: str


_PARTS: Mapping[str, _ClusterPart] = {
    BROKER_URL: _ClusterPart("broker", "nats_url", "broker_url"),
    CONFIG_URL: _ClusterPart("config service", "config_service_url", "config_url"),
    GATEWAY_URL: _ClusterPart("gateway", "gateway_url", "gateway_url"),
}


@dataclass(frozen=True)
class Cluster:
    """Addresses of a cluster's processes, and the credentials for them. `sources`: name of a setting -> source of the
    value. `data_dir`: data directory of the `sie serve` to look for. `is_named`: the user named `data_dir`.
    `admin_token`: the user's SIE_ADMIN_TOKEN, while `settings.admin_token` may be the token of a `sie serve`.
    """

    settings: Settings
    sources: Mapping[str, str]
    data_dir: Path
    is_named: bool = False
    admin_token: Secret | None = None

    @classmethod
    def locate(
        cls, loaded_settings: Loaded, named: Path | None = None, *, looks_around: bool = True, required: bool = True
    ) -> Cluster:
        """Return the cluster of these settings, with the addresses of a running `sie serve` (see `_with`). `named`:
        data directory in which `sie serve` wrote its addresses. If `named` is None, the default directory is read, but
        only if `looks_around`. Raises SettingError if the access file in the directory is invalid, or if `required` and
        no `sie serve` runs with `named`.
        """
        data_dir = (named or default_data_dir()).absolute()
        settings, sources = _as_client(loaded_settings)
        cluster = cls(settings, sources, data_dir, named is not None, settings.admin_token)
        if named is None and (not looks_around or all(sources[name] != "default" for name in _PARTS)):
            return cluster
        written = cluster.local()
        if written is None:
            if named is not None and required:
                there = f"it has no {access.FILE} of a running server" if named.exists() else "it does not exist"
                raise SettingError(
                    "--data-dir", f"no `sie serve` runs with {named}: {there}; start one with `{cluster.serve}`"
                )
            return cluster
        return cluster._with(written)

    def _with(self, written: Access) -> Cluster:
        """Return a copy with the addresses and credentials of a running `sie serve`. Addresses from options stay.
        Addresses from the environment stay only if the user did not name the data directory.
        """
        sources = dict(self.sources)
        chosen = {
            name for name in _PARTS if sources[name] == "flag" or (sources[name] == "environment" and not self.is_named)
        }
        local = {name: str(getattr(written, part.local)) for name, part in _PARTS.items()}
        configured = {name: getattr(self.settings, part.field) for name, part in _PARTS.items()}
        local_names = {
            name for name in chosen if public_url(configured[name] or "").rstrip("/") in local[name].split(",")
        }
        # If the user set an address of another cluster, the other addresses must not come from this `sie serve`,
        # because one command would then use two clusters.
        is_ours = self.is_named or chosen == local_names
        changes: dict[str, Any] = {}
        for name, part in _PARTS.items():
            if local[name] and (name in local_names or (is_ours and name not in chosen)):
                sources[name] = SOURCE
                changes |= {
                    part.field: configured[name] if name in local_names else local[name],
                    **_credentials(name, written),
                }
        return dataclasses.replace(self, settings=dataclasses.replace(self.settings, **changes), sources=sources)

    def local(self) -> Access | None:
        """Return addresses and credentials of a running `sie serve` with `data_dir`, or None. Raises SettingError."""
        return access.read(self.data_dir)

    def is_given(self, name: str) -> bool:
        """Return whether the user set this setting by an option or an environment variable."""
        return self.sources.get(name) in ("flag", "environment")

    @property
    def serve(self) -> str:
        return f"sie serve{self.data_dir_option}"

    @property
    def data_dir_option(self) -> str:
        """` --data-dir FOLDER` for a command line; empty for the default directory."""
        is_default = self.data_dir == default_data_dir().absolute()
        return "" if is_default else f" --data-dir {shlex.quote(str(self.data_dir))}"

    @property
    def gateway_urls(self) -> list[str]:
        """URLs of the gateways, without a final slash. If none is set: GATEWAY, a URL of this machine."""
        return [url.strip().rstrip("/") for url in (self.settings.gateway_url or GATEWAY).split(",")]

    @property
    def gateway_token(self) -> Secret | None:
        """Token for the gateways: the user's client token. Without a client token, it is SIE_ADMIN_TOKEN, but only if
        the gateways' address is from the environment.
        """
        settings = self.settings
        own = settings.auth_token or (settings.auth_tokens or (None,))[0]
        return own or (settings.admin_token if self.sources.get(GATEWAY_URL) == "environment" else None)

    @property
    def gateway_admin_token(self) -> Secret | None:
        """Token for administrator routes: SIE_ADMIN_TOKEN. It is `gateway_token` in two cases: if the gateway is a
        process of the local `sie serve`, and if the user has no SIE_ADMIN_TOKEN.
        """
        own = None if self.sources.get(GATEWAY_URL) == SOURCE else self.admin_token
        return own or self.gateway_token

    @property
    def first_patience_s(self) -> float:
        """Seconds in which a command retries its first connection to the gateway. 0 if the address is on this machine
        and no `sie serve` runs, because no gateway is starting.
        """
        return 0.0 if self.local() is None and is_local(self.gateway_urls[0]) else FIRST_S

    def without_gateway(self, url: str, error: BaseException) -> str:
        """Return the error text for a failed connection to the gateway at `url`. `error`: the connection's error."""
        cause = "" if is_refused(error) else f" ({cause_of(error)})"
        advice = "is it running at this address? Set another address with --url"
        if self.local() is None and is_local(url):
            advice = f"start one with `{self.serve}`, or name another address with --url"
        return f"no gateway answers at {public_url(url)}{cause}: {advice}"

    def config_token(self, *, writes: bool) -> Secret | None:
        """Return the token for the config service: the read token if it is set and `writes` is False, else the admin
        token. None if neither token is set.
        """
        read_token = None if writes else self.settings.config_read_token
        return read_token or self.settings.admin_token

    async def open_broker(self, name: str, url: str = "") -> NatsBroker:
        """Connect to the broker at `url`, or at the address in the settings if `url` is empty. Send the password only
        to the address in the settings. The caller closes the connection. Raises BrokerUnavailable, and SettingError if
        neither `url` nor the settings have an address.
        """
        from sie_broker.nats import NatsBroker

        address = url or self.settings.nats_url
        if address is None:
            raise SettingError(BROKER_URL, self.missing(BROKER_URL))
        broker = NatsBroker(name)
        password = self.settings.nats_password if address == self.settings.nats_url else None
        await broker.open(address, CONNECT_S, password)
        return broker

    def at_broker(self, name: str, work: Callable[[NatsBroker], Awaitable[T]]) -> T:
        """Call `work` with a connection to the broker; return its result. Exit with status 2 if the broker's address is
        unknown, if no broker answers, or if `work` raises BrokerError. If `work` raises SIEError or OSError, raises
        CommandRefused.
        """
        from sie_broker import BrokerError, BrokerUnavailable

        async def run() -> T:
            try:
                broker = await self.open_broker(name)
            except BrokerUnavailable as error:
                refuse(f"{error}: is it running at this address? Set another address with --nats-url")
            try:
                return await work(broker)
            finally:
                await broker.close()

        # hide the broker client's log lines, because the raised error has all their information
        logging.getLogger("sie.broker").addHandler(logging.NullHandler())
        try:
            with refusing():
                return asyncio.run(run())
        except (SettingError, BrokerError) as error:
            refuse(error)

    def missing(self, name: str) -> str:
        """Return the error text for an unknown address of a gateway, config service or broker. It says how to set the
        address. `name`: the setting of the address.
        """
        part = _PARTS[name].name
        running = self.local()
        if running is None:
            return (
                f"no `sie serve` runs with the data directory {self.data_dir}: start one with `{self.serve}`, or say "
                f"where a {part} is, with --url URL ({name}) or with --data-dir FOLDER of another `sie serve`"
            )
        return (
            f"the `sie serve` at {running.gateway_url} did not start a {part}: it runs with --standalone, or with a "
            f"{part} that the operator named; give its address with --url URL ({name})"
        )


def _as_client(loaded_settings: Loaded) -> tuple[Settings, dict[str, str]]:
    """Return settings and sources, changed by the environment variables that the SDKs also read. SIE_API_KEY sets the
    token for gateways. SIE_BASE_URL sets the gateway's address if no other setting has the address.
    """
    changes: dict[str, Any] = {}
    sources = dict(loaded_settings.sources)
    if key := client_environment.api_key():
        changes["auth_token"] = Secret(key)
    if sources[GATEWAY_URL] == "default" and (url := client_environment.base_url()):
        changes["gateway_url"], sources[GATEWAY_URL] = url, "environment"
    return dataclasses.replace(loaded_settings.settings, **changes), sources


def _credentials(name: str, written: Access) -> dict[str, object]:
    if name == BROKER_URL:
        return {"nats_url": as_operator(written.broker_url), "nats_password": Secret(written.operator_password)}
    token = Secret(written.admin_token)
    return {"auth_token": token} if name == GATEWAY_URL else {"admin_token": token, "config_read_token": token}


def cluster_options(address: str, *settings: str, looks_around: bool = True, required: bool = True) -> Callable[[F], F]:
    """Return a decorator that adds the options --url (for the setting `address`), --data-dir, and one for each setting
    in `settings`. The command gets the resulting Cluster as its first argument. `required`: refuse a --data-dir with
    which no `sie serve` runs.
    """
    names = (address, *settings)

    def decorate(command: F) -> F:
        @functools.wraps(command)
        def run(*args: Any, data_dir: Path | None, **options: Any) -> Any:
            values = {BY_NAME[name].field: options.pop(BY_NAME[name].field) for name in names}
            loaded_settings = loaded(values)
            try:
                cluster = Cluster.locate(loaded_settings, data_dir, looks_around=looks_around, required=required)
            except SettingError as error:
                refuse(error)
            return command(cluster, *args, **options)

        return data_dir_option(url_option(address, _PARTS[address].name)(named_options(*settings)(cast(F, run))))

    return decorate


def data_dir_option(command: F) -> F:
    return click.option("--data-dir", type=click.Path(path_type=Path), metavar="FOLDER", default=None, help=DATA_DIR)(
        command
    )
