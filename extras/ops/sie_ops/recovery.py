"""`sie backup` and `sie restore` for the control plane, and `sie repair` for streams with damaged files.

sie backup FILE ◄── keys, changes of the catalogue over the API, records of jobs, shards and files ── broker
sie restore FILE ──► missing entries, later revisions of models and revocations are written; nothing else changes
sie repair STREAM ──► the stream is created again: with its readable entries, with those of its copy, or empty
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

import sie_contracts
from sie_broker import KeyValue, Write, WrongRevision
from sie_broker.record import retry_conflicts
from sie_cli.access import write_private
from sie_cli.cluster import BROKER_URL, Cluster, cluster_options
from sie_cli.display import counted, printable
from sie_cli.moments import moment
from sie_cli.refusal import CommandRefused, refusing
from sie_config_service.mirror import StoredModel
from sie_config_service.store import open_store
from sie_contracts.errors import UNDECODABLE, NotReady
from sie_contracts.wire import topology
from sie_runtime import keys as key_records
from sie_runtime.keys import Key, KeyBuckets

if TYPE_CHECKING:
    from sie_broker.nats import NatsBroker
    from sie_broker.nats.api import StreamInfo

FORMAT = b"sie backup 1 "
BATCH = 200  # number of entries per batch of writes; the broker accepts at most 1,000
BATCH_BYTES = 4 << 20
KEYS = (f"KV_{topology.KEYS_BUCKET}", f"KV_{topology.KEYS_COPY_BUCKET}")
# Buckets that `sie repair` fills with the readable entries, and `sie restore` with the entries of a backup. Shards
# (parts of jobs) come before the jobs, because the leader of a job reads the job's shards as soon as the job exists.
LASTING = (topology.SHARDS_BUCKET, topology.JOBS_BUCKET, topology.POOLS_BUCKET)
_STREAM = re.compile(r"[A-Za-z0-9_-]{1,255}")
DAMAGED = "damaged"  # folder in the data directory for the files of unreadable streams, and for salvaged entries


class Backup(msgspec.Struct, frozen=True):
    """Content of a backup. `entries`: bucket name -> keys and values, for buckets in LASTING."""

    version: str
    made_s: float
    keys: list[Key]
    catalogue: list[StoredModel]
    entries: dict[str, list[tuple[str, bytes]]]


_SETTINGS = ("SIE_STREAM_STORAGE", "SIE_STREAM_REPLICAS")
_options = cluster_options(BROKER_URL, *_SETTINGS)
_file = click.argument("file", type=click.Path(path_type=Path, dir_okay=False))


@click.command(short_help="Save keys, catalogue and jobs in one file.")
@_file
@click.option("--force", is_flag=True, help="Replace an existing FILE.")
@_options
def backup(cluster: Cluster, file: Path, force: bool) -> None:
    """Write the control plane of a running cluster to a file: API keys, the models and aliases that were written over
    the API (with their history), and the records of jobs, shards and files.

    The file has no payloads (inputs of clients, bytes of files, output of jobs): back up the payload store separately.
    It has no models from folders, no queued work and no dead letters. It has digests of tokens and names of clients, so
    its mode is 0600: protect it like a secret.
    """
    if file.exists() and not force:
        raise CommandRefused(f"{file} exists: name another file, or replace it with --force")

    async def body(broker: NatsBroker) -> Backup:
        replicas = cluster.settings.stream_replicas
        buckets = await KeyBuckets.open(broker, replicas)
        entries = {}
        # Read the shards first: if a job begins between the two reads, the backup has the job without its shards. In
        # the other order it would have shards without their job, which `sie doctor` reports as damage.
        for name in (topology.SHARDS_BUCKET, topology.JOBS_BUCKET):
            stored = await (await broker.key_value(name, replicas=replicas)).entries()
            entries[name] = [(entry.key, entry.value) for entry in stored if entry.value is not None]
        store = await open_store(broker, cluster.settings)
        keys = [key for key, _ in await buckets.read()]
        return Backup(sie_contracts.__version__, time.time(), keys, await store.backup(), entries)

    snapshot = cluster.at_broker("sie-backup", body)
    with refusing():
        _write_backup(file, snapshot)
    click.echo(f"{file}: {_contents(snapshot)}")


def _write_backup(file: Path, snapshot: Backup) -> None:
    content = msgspec.msgpack.encode(snapshot)
    write_private(file, FORMAT + hashlib.sha256(content).hexdigest().encode() + b"\n" + content)


def read_backup(file: Path) -> Backup:
    with refusing():
        head, _, content = file.read_bytes().partition(b"\n")
    if not head.startswith(FORMAT):
        raise CommandRefused(
            f"{file} is no backup that this version of `sie` can read; restore a backup with the `sie` that wrote it"
        )
    if head.removeprefix(FORMAT).decode("ascii", "replace") != hashlib.sha256(content).hexdigest():
        raise CommandRefused(f"{file} is damaged: its digest differs; use another backup")
    try:
        saved = msgspec.msgpack.decode(content, type=Backup)
        for key in (key for entries in saved.entries.values() for key, _ in entries):
            Write(key, None)  # raises ValueError for a key that no bucket accepts
        for record in saved.keys:
            Write(record.id, None)
    except UNDECODABLE as error:
        raise CommandRefused(
            f"{file} is a backup of another version: restore it with the `sie` that wrote it ({error})"
        ) from error
    return saved


def _contents(snapshot: Backup) -> str:
    files = sum(key.startswith("file.") for key, _ in snapshot.entries.get(topology.JOBS_BUCKET, ()))
    models = len({stored.model for stored in snapshot.catalogue})
    return ", ".join(
        (
            counted(len(snapshot.keys), "key"),
            f"{counted(models, 'model')} and aliases of the API in {counted(len(snapshot.catalogue), 'revision')}",
            counted(len(snapshot.entries.get(topology.JOBS_BUCKET, ())) - files, "job"),
            counted(files, "file"),
            counted(len(snapshot.entries.get(topology.SHARDS_BUCKET, ())), "shard"),
        )
    )


@click.command(short_help="Write the entries of a backup that the cluster lacks.")
@_file
@_options
def restore(cluster: Cluster, file: Path) -> None:
    """Write the entries of a backup that a running cluster lacks. The cluster may be empty or in use.

    No entry of the cluster is replaced by an older one: a model with the same or a higher revision stays, a job
    stays unchanged, a revoked key stays revoked. To go back in time, restore into an empty cluster: stop it, move its
    broker's folder away, start it, restore.
    """
    saved = read_backup(file)

    async def body(broker: NatsBroker) -> list[str]:
        replicas = cluster.settings.stream_replicas
        buckets = await KeyBuckets.open(broker, replicas)
        lines = [f"keys: {await retry_conflicts(lambda: _write_keys(buckets, saved.keys))} written"]
        store = await open_store(broker, cluster.settings)
        lost = await retry_conflicts(lambda: store.recover(saved.catalogue))
        lines.append(f"models and aliases: {len(lost)} written")
        for name in LASTING:
            if entries := saved.entries.get(name):
                written = await _write_missing(await broker.key_value(name, replicas=replicas), entries)
                lines.append(f"{name}: {written} of {len(entries)} written")
        return lines

    click.echo(f"backup of {moment(saved.made_s)} (sie {printable(saved.version)}): {_contents(saved)}")
    for line in cluster.at_broker("sie-restore", body):
        click.echo(line)


async def _write_keys(buckets: KeyBuckets, keys: list[Key]) -> int:
    """Write keys to the bucket of keys and to its copy. If the bucket has a record of a key already, keep the stricter
    of the two records. Leave out a key that was removed from either bucket. Return the number of keys written to the
    main bucket. Raises WrongRevision if another process changes a key meanwhile.
    """
    removed = {
        entry.key for bucket in (buckets.copy, buckets.bucket) for entry in await bucket.since(0) if entry.value is None
    }
    for bucket in (buckets.copy, buckets.bucket):
        entries = await bucket.entries()
        present = {key.id: key for key, _ in key_records.readable(entries)}
        # has the revisions of undecodable records too, so that the code below can replace these records
        revisions = {entry.key: entry.revision for entry in entries}
        written = 0
        for key in keys:
            if key.id in removed:
                continue
            before = present.get(key.id)
            counts = key_records.stricter(before, key)
            if counts is not None and counts != before:
                await bucket.write([Write(key.id, key_records.encode(counts), revisions.get(key.id, 0))])
                written += 1
    return written


async def _write_missing(bucket: KeyValue, entries: list[tuple[str, bytes]]) -> int:
    """Write the entries whose keys a bucket lacks. Return the number of written entries."""
    present = {entry.key for entry in await bucket.entries()}
    missing = [Write(key, value, 0) for key, value in entries if key not in present]
    batch: list[Write] = []
    written = 0
    for write in missing:
        batch.append(write)
        if len(batch) == BATCH or sum(len(entry.value or b"") for entry in batch) > BATCH_BYTES or write is missing[-1]:
            written += await _write_batch(bucket, batch)
            batch = []
    return written


async def _write_batch(bucket: KeyValue, batch: list[Write]) -> int:
    """Write the entries whose keys still do not exist. Another process may have written a key since the caller read the
    bucket. Return the number of written entries.
    """
    try:
        await bucket.write(batch)
        return len(batch)
    except WrongRevision:
        if len(batch) == 1:
            return 0
    return sum([await _write_batch(bucket, [write]) for write in batch])


@click.command(short_help="Create a damaged stream again.")
@click.argument("stream")
@cluster_options(BROKER_URL, *_SETTINGS, required=False)
def repair(cluster: Cluster, stream: str) -> None:
    """Create a stream or bucket again. `sie doctor` names the damaged ones, `sie topology show` lists all.

    \b
    KV_sie_keys, KV_sie_keys_copy              filled from each other; the stricter record of a key is used
    KV_sie_catalogue                           filled from its copy; the config service adds the models of folders
    KV_sie_catalogue_copy                      filled from the catalogue
    KV_sie_jobs, KV_sie_shards                 filled with the readable entries; `sie restore FILE` writes the rest
    KV_sie_pools                               filled with the readable entries
    all others                                 empty: placement, demand, leases, poison, work and dead letters

    A bucket that can be read keeps its entries. Salvaged entries are in a file of the
    folder `damaged` until the stream is created again: `sie restore` writes them back if the command is interrupted.

    Requests whose work was in a stream of work end with an error, and clients may send them again. If the broker of
    `sie serve` does not start because of a stream's files, stop `sie serve` and give its --data-dir: then
    this command moves the files to DATA_DIR/damaged, and the next start creates the stream again.
    """
    if not _STREAM.fullmatch(stream):
        raise CommandRefused(f"{stream} cannot be the name of a stream; `sie topology show` lists all")
    if cluster.settings.nats_url is None:
        click.echo(_set_aside(cluster, stream))
        return

    async def body(broker: NatsBroker) -> str:
        info = await broker.stream_info(stream)
        if stream in KEYS:
            return await _repair_keys(broker, cluster)
        if info is None:
            raise CommandRefused(f"the broker has no stream {stream}; `sie topology show` lists all")
        return await _repair(broker, cluster, info)

    click.echo(cluster.at_broker("sie-repair", body))


def _set_aside(cluster: Cluster, stream: str) -> str:
    """Move the files of a stream to the folder `damaged`. The broker must not be running."""
    folders = [path for path in (cluster.data_dir / "nats" / "jetstream").glob("*/streams/*") if path.name == stream]
    if not folders:
        raise CommandRefused(f"there are no files of a stream {stream} in {cluster.data_dir / 'nats'}")
    place = cluster.data_dir / DAMAGED / f"{stream}-{time.time_ns()}"
    with refusing():
        place.parent.mkdir(mode=0o700, exist_ok=True)
        folders[0].rename(place)
    return f"the files of {stream} are in {place} now; `{cluster.serve}` creates the stream again"


@contextlib.contextmanager
def _saved(
    cluster: Cluster, stream: str, keys: list[Key], entries: dict[str, list[tuple[str, bytes]]]
) -> Iterator[None]:
    """Save entries in a file that `sie restore` reads. Remove the file when the context ends without an error."""
    file = cluster.data_dir / DAMAGED / f"{stream}-{time.time_ns()}.sie"
    empty: dict[str, list[tuple[str, bytes]]] = {name: [] for name in LASTING}
    with refusing():
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_backup(file, Backup(sie_contracts.__version__, time.time(), keys, [], empty | entries))
    click.echo(
        f"the salvaged entries are in {file}; if this command is interrupted, run: sie restore "
        f"{shlex.quote(str(file))}",
        err=True,
    )
    yield
    file.unlink()


async def _repair_keys(broker: NatsBroker, cluster: Cluster) -> str:
    from sie_broker.nats.operator import damage, remake, salvage

    keys: dict[str, Key] = {}
    damaged: list[StreamInfo] = []
    for stream in KEYS:
        info = await broker.stream_info(stream)
        if info is None:
            continue
        for key, _ in key_records.readable(await salvage(broker, stream)):
            keys[key.id] = key_records.stricter(keys.get(key.id), key) or key
        if await damage(broker, info):
            damaged.append(info)
    with _saved(cluster, KEYS[0], list(keys.values()), {}):
        for info in damaged:
            await remake(broker, info)
        buckets = await KeyBuckets.open(broker, cluster.settings.stream_replicas)
        written = await retry_conflicts(lambda: _write_keys(buckets, list(keys.values())))
    return f"{KEYS[0]} has {counted(len(keys), 'key')}, of which {written} were written; {KEYS[1]} has the same keys"


async def _repair(broker: NatsBroker, cluster: Cluster, info: StreamInfo) -> str:
    from sie_broker.nats.operator import damage, remake, salvage

    stream = str(info.config["name"])
    bucket = stream.removeprefix("KV_")
    if bucket in (topology.CATALOGUE_BUCKET, topology.CATALOGUE_COPY_BUCKET):
        if not await damage(broker, info):
            # NotReady says that a record cannot be decoded. The code below then creates the bucket again.
            with contextlib.suppress(NotReady):
                lost = await _recover_catalogue(broker, cluster)
                more = f"; written to the catalogue from its copy: {counted(len(lost), 'model')}" if lost else ""
                return f"{stream} can be read, so it stays as it is{more}"
        await remake(broker, info)
        await _recover_catalogue(broker, cluster)
        return f"{stream} was created again with the models from the API; the config service adds those from folders"
    # a readable bucket stays, because creating it again would not restore the entries that it lacks
    if bucket != stream and not await damage(broker, info):
        more = "; `sie restore FILE` writes the entries that it lacks" if bucket in LASTING else ""
        return f"{stream} can be read, so it stays as it is{more}"
    if bucket not in LASTING:
        await remake(broker, info)
        return f"{stream} was created again, without entries"
    left = await salvage(broker, stream)
    entries = [(entry.key, entry.value) for entry in left if entry.value is not None]
    with _saved(cluster, stream, [], {bucket: entries}):
        await remake(broker, info)
        written = await _write_missing(await broker.key_value(bucket), entries)
    return f"{stream} was created again, with {counted(written, 'entry', 'entries')}"


async def _recover_catalogue(broker: NatsBroker, cluster: Cluster) -> list[str]:
    """Write the models that the catalogue or its copy lacks. Return the models that the catalogue lacked. Raises
    NotReady if a record of the catalogue cannot be decoded.
    """
    store = await open_store(broker, cluster.settings)
    return await retry_conflicts(store.recover)
