"""`sie keys`: create, list and revoke the keys of the gateways' clients, for SIE_AUTH_MODE=token."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from sie_broker import Broker, WrongRevision
from sie_cli import display
from sie_cli.cluster import BROKER_URL, Cluster, cluster_options, data_dir_option
from sie_cli.moments import Deadline, moment
from sie_cli.options import AnyPosition, loaded, refuse
from sie_cli.refusal import CommandRefused
from sie_contracts.settings import SettingError
from sie_contracts.wire import topology
from sie_runtime import keys as records
from sie_runtime.http.routes import SCOPES
from sie_runtime.keys import Key, KeyBuckets, KeyLimits

DEFAULT_SCOPES = "infer,read,pools"
MAX_KEYS = 10_000  # `create` refuses more keys than this, because every gateway has all keys in memory
_SIZES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._@/-]{0,63}")


def _scopes(text: str) -> tuple[str, ...]:
    requested = [part.strip().lower() for part in text.split(",") if part.strip()]
    unknown = [part for part in requested if part not in SCOPES]
    if unknown or not requested:
        raise click.BadParameter(
            f"{', '.join(unknown) or 'nothing'}: expected some of {', '.join(SCOPES)}, joined by commas"
        )
    return tuple(scope for scope in SCOPES if scope in requested)


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d{1,12})([kmg]?)(?:ib|b)?", text.strip().lower())
    if match is None or not int(match[1]):
        raise click.BadParameter(f"{text[:40]}: expected a number of bytes, such as 500000, 64K, 20M or 1G")
    return int(match[1]) * _SIZES[match[2]]


_options = cluster_options(BROKER_URL, "SIE_STREAM_REPLICAS")


@click.group(cls=AnyPosition, short_help="Tokens for clients, with scopes and limits.")
def keys() -> None:
    """Manage the keys of clients, for gateways with SIE_AUTH_MODE=token. A key has scopes, limits, and a time at
    which it expires.

    \b
    sie keys create search-team                            may encode, score, extract, list models, reserve pools
    sie keys create nightly --scopes infer --expires 90d --tokens-per-minute 2000000
    sie keys create ops --scopes config,read               may change the catalogue
    sie keys admin                                         the administrator's token of a `sie serve` of this user
    sie keys list                                          show all keys, but no tokens
    sie keys revoke ID                                     end a key: within a second, all gateways refuse it
    sie keys revoke --token                                the same for a token that leaked

    Keys are stored in the broker, as digests. This command connects to the broker, not to a gateway, and needs no
    token: whoever may write to the broker may create keys. It finds the broker of this user's `sie serve` by its data
    folder (--data-dir). Name any other broker with --url or SIE_NATS_URL, and SIE_NATS_PASSWORD.
    Beside keys, gateways accept the tokens in SIE_AUTH_TOKEN, SIE_AUTH_TOKENS and SIE_ADMIN_TOKEN.

    \b
    infer    encode, score, extract, also by the compatible APIs         pools    make, renew and delete reservations
    read     models, health, status, scaling, pools, config              config   change the catalogue
    admin    every right of an administrator; includes pools if SIE_POOL_WRITE_ROLE=admin
    """


@keys.command()
@click.argument("name")
@click.option(
    "--scopes",
    type=_scopes,
    metavar="SCOPES",
    default=DEFAULT_SCOPES,
    show_default=True,
    help="What the key may do. `sie keys --help` explains the scopes.",
)
@click.option(
    "--expires",
    type=Deadline.parse,
    metavar="TIME",
    help="Time at which the key ends: 12h, 90d, 2030-01-31.  [default: never]",
)
@click.option(
    "--max-body",
    "body_bytes",
    type=_bytes,
    metavar="SIZE",
    help="Maximum bytes in a request of this key: 64K, 16M.  [default: SIE_MAX_BODY_BYTES of the gateways, 96M]",
)
@click.option(
    "--max-items",
    "items",
    type=click.IntRange(1),
    help="Maximum inputs in a request of this key.  [default: SIE_MAX_ITEMS_PER_REQUEST of the gateways, 2048]",
)
@click.option(
    "--tokens-per-minute",
    "rate",
    type=click.IntRange(1),
    help="Maximum tokens per minute of this key, over all gateways together.  [default: no limit]",
)
@click.option("--no-cache", is_flag=True, help="Do not cache the answers to this key (SIE_CACHE_BYTES).")
@click.option("--json", "as_json", is_flag=True, help="Print the key and its token as JSON.")
@_options
def create(
    cluster: Cluster,
    name: str,
    scopes: tuple[str, ...],
    expires: Deadline | None,
    body_bytes: int | None,
    items: int | None,
    rate: int | None,
    no_cache: bool,
    as_json: bool,
) -> None:
    """Create a key and print its token. The token is shown only now, because it is not stored.

    Standard output gets only the token, so `sie keys create NAME > file` stores it in a file. Clients send it
    as `Authorization: Bearer TOKEN`. A client over its limits gets 413, 400 `too_many_items`, or 429 `RATE_LIMITED`
    with `Retry-After`.
    """
    if not _NAME.fullmatch(name):
        raise click.BadParameter(
            "expected at most 64 letters, digits, spaces and . _ @ / -, of which the first is a letter or digit",
            param_hint="NAME",
        )
    limits = KeyLimits(body_bytes or 0, items or 0, rate or 0)

    async def body(broker: Broker) -> tuple[Key, str, float]:
        buckets, now_s = await _opened(broker, cluster)
        expires_s = expires.after(now_s) if expires is not None else 0.0
        key, token = records.create(name, scopes, now_s=now_s, expires_s=expires_s, limits=limits, caches=not no_cache)
        keys = [present for present, _ in await buckets.read()]
        if len(keys) >= MAX_KEYS:
            raise CommandRefused(
                f"there are {len(keys)} keys, at most {MAX_KEYS} are allowed: remove ended keys with `sie keys revoke "
                "ID --forget`"
            )
        if any(key.name == name and not key.ended(now_s) for key in keys):
            raise CommandRefused(f"a key named {name} is in use; revoke it first, or choose another name")
        await buckets.write(key, 0)
        return key, token, now_s

    key, token, now_s = cluster.at_broker("sie-keys", body)
    if as_json:
        click.echo(display.document({**_plain(key), "token": token}))
        return
    line = f"key {key.id} {name}: {', '.join(scopes)}; {_end(key, now_s)}."
    click.echo(f"{line} Gateways with SIE_AUTH_MODE=token accept its token, which is shown only now:", err=True)
    click.echo(token)


@keys.command("admin")
@data_dir_option
def admin_command(data_dir: Path | None) -> None:
    """Print the administrator's token of this user's `sie serve`. The page of a gateway asks for this token. It is the
    SIE_ADMIN_TOKEN of `sie serve` if that is set. Otherwise it is a token that is valid until `sie serve` ends.
    """
    try:
        cluster = Cluster.locate(loaded({}), data_dir)
        running = cluster.local()
    except SettingError as error:
        refuse(error)
    if running is None:
        raise CommandRefused(
            f"no `sie serve` runs with the data directory {cluster.data_dir}: `{cluster.serve}` starts one; the token "
            "of another cluster is its SIE_ADMIN_TOKEN"
        )
    click.echo(running.admin_token)


@keys.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array, for programs.")
@_options
def list_command(cluster: Cluster, as_json: bool) -> None:
    """List all keys. The columns are id, name, scopes, times of creation and end, and limits. The tokens are not
    stored, so they are not shown.
    """

    async def body(broker: Broker) -> tuple[list[Key], float]:
        buckets, now_s = await _opened(broker, cluster)
        return [key for key, _ in await buckets.read()], now_s

    keys, now_s = cluster.at_broker("sie-keys", body)
    listed = sorted(keys, key=lambda key: key.created_s)
    if as_json:
        click.echo(display.document([_plain(key) for key in listed]))
        return
    if not listed:
        click.echo("no keys")
        return
    rows = [("ID", "NAME", "SCOPES", "CREATED (UTC)", "STATE", "LIMITS")]
    rows += [
        (key.id, key.name, ",".join(key.scopes), moment(key.created_s), _end(key, now_s), _limits(key))
        for key in listed
    ]
    display.table(rows)


@keys.command()
@click.argument("identifier", metavar="[ID_OR_NAME]", required=False)
@click.option(
    "--token",
    "by_token",
    is_flag=True,
    help="Name the key by its token. The command asks for the token without showing it, or reads it from a pipe.",
)
@click.option(
    "--forget",
    is_flag=True,
    help="Delete the record of the key too, so that `sie keys list` does not show the key any more.",
)
@_options
def revoke(cluster: Cluster, identifier: str | None, by_token: bool, forget: bool) -> None:
    """End a key now. Gateways refuse it within a second; requests in progress are finished. This cannot be undone.

    A name selects the key with this name that has not ended. If several have it, none is revoked, and their ids are
    shown.
    """
    if (identifier is None) != by_token:
        raise click.UsageError("give the ID or the name of a key (`sie keys list` shows them), or --token")
    digest = records.digest_of(_prompted_token()) if by_token else ""

    async def body(broker: Broker) -> Key:
        buckets, now_s = await _opened(broker, cluster)
        stored = await buckets.read()
        matches = [pair for pair in stored if (pair[0].digest == digest if by_token else pair[0].id == identifier)]
        if not by_token and not matches:
            matches = [pair for pair in stored if pair[0].name == identifier and not pair[0].ended(now_s)]
        if not matches:
            raise CommandRefused(
                "no key has this token" if by_token else f"there is no key {identifier}; `sie keys list` shows all"
            )
        if len(matches) > 1:  # `sie restore`, or two commands at the same moment, can give one name to several keys
            ids = ", ".join(key.id for key, _ in matches)
            raise CommandRefused(f"several keys are named {identifier}: revoke each by its id, {ids}")
        key, revision = matches[0]
        ended = msgspec.structs.replace(key, revoked_s=key.revoked_s or now_s)
        try:
            await (buckets.remove(ended, revision) if forget else buckets.write(ended, revision))
        except WrongRevision as error:
            raise CommandRefused(
                f"key {key.id} was changed by another command: check `sie keys list` and try again"
            ) from error
        return key

    key = cluster.at_broker("sie-keys", body)
    click.echo(f"key {key.id} {key.name} is {'revoked and forgotten' if forget else 'revoked'}")


def _prompted_token() -> str:
    if sys.stdin.isatty():
        return str(click.prompt("token", hide_input=True)).strip()
    return sys.stdin.readline().strip()


async def _opened(broker: Broker, cluster: Cluster) -> tuple[KeyBuckets, float]:
    """Return the buckets of the keys, and the broker's time (Unix), by which keys expire. Raises BrokerError."""
    buckets = await KeyBuckets.open(broker, cluster.settings.stream_replicas)
    return buckets, await broker.server_time(f"KV_{topology.KEYS_BUCKET}")


def _plain(key: Key) -> dict[str, Any]:
    return {
        "id": key.id,
        "name": key.name,
        "scopes": list(key.scopes),
        "created_s": key.created_s,
        "expires_s": key.expires_s or None,
        "revoked_s": key.revoked_s or None,
        "max_body_bytes": key.limits.body_bytes or None,
        "max_items": key.limits.items or None,
        "tokens_per_minute": key.limits.tokens_per_minute or None,
        "caches": key.caches,
    }


def _end(key: Key, now_s: float) -> str:
    if key.revoked_s:
        return f"revoked {moment(key.revoked_s)}"
    if not key.expires_s:
        return "never expires"
    return f"{'expired' if key.ended(now_s) else 'until'} {moment(key.expires_s)}"


def _limits(key: Key) -> str:
    limits = key.limits
    parts = [
        f"{limits.body_bytes:,} bytes" if limits.body_bytes else "",
        f"{limits.items:,} items" if limits.items else "",
        f"{limits.tokens_per_minute:,} tokens/min" if limits.tokens_per_minute else "",
        "" if key.caches else "no cache",
    ]
    return ", ".join(filter(None, parts)) or "-"
