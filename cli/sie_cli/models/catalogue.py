"""The commands of `sie models` that call the config service: they list models, show their history, and change them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
import yaml
from msgspec import UNSET

from sie_cli import display
from sie_cli.cluster import Cluster
from sie_cli.display import printable
from sie_cli.models.service import (
    JSON,
    MODELS,
    YAML,
    ServiceReply,
    WriteOptions,
    path_of,
    service_of,
    service_options,
    shown,
    write_options,
)
from sie_contracts import yaml_text
from sie_contracts.api.configs import ConfigModels, ModelHistory, ModelRevisions, Written
from sie_contracts.models.entries import MULTILINGUAL
from sie_contracts.settings import public_url

_SEGMENT = re.compile(r'(?:"([^"]+)"|([^."=]+))(\.|$)')
MAX_BYTES = 1 << 20
_COLUMNS = ("MODEL", "TASKS", "LANGUAGES", "DOWNLOAD", "PROFILES", "SOURCE")
_UNSTATED = "not stated"
_SIZES = (
    ("up to 100 MB", 1e8),
    ("up to 500 MB", 5e8),
    ("up to 2 GB", 2e9),
    ("up to 8 GB", 8e9),
    ("more than 8 GB", float("inf")),
)
# value of --by -> function that returns the groups of a model
_GROUPS: dict[str, Callable[[dict[str, Any]], Sequence[str]]] = {
    "task": lambda model: model.get("tasks") or (_UNSTATED,),
    "language": lambda model: model.get("languages") or (_UNSTATED,),
    "size": lambda model: (_size(model),),
}
MAX_CHANGES = 4  # maximum number of listed changes of a revision; the table gives the number of the others


@click.command("list")
@click.option("--task", type=click.Choice(("encode", "score", "extract")), help="List only models with this task.")
@click.option(
    "--language", metavar="CODE", help=f"List only models for this language, such as de, and {MULTILINGUAL} models."
)
@click.option("--by", type=click.Choice(tuple(_GROUPS)), help="List the models in groups by this property.")
@service_options
def list_command(
    cluster: Cluster, *, output: str | None, task: str | None, language: str | None, by: str | None
) -> None:
    """List the models of the catalogue. The columns are id, tasks, languages, approximate bytes of the first download,
    profiles, and source: packaged, overlay (SIE_MODELS_DIR) or api.
    """
    with service_of(cluster, writes=False) as service:
        body = service.read(MODELS, ConfigModels).plain
    click.echo(f"models of {public_url(service.url)}", err=True)
    chosen = [
        model
        for model in body["models"]
        if (task is None or task in model.get("tasks", ()))
        and (language is None or {language, MULTILINGUAL} & set(model.get("languages", ())))
    ]
    print_body({**body, "models": chosen}, output, lambda: _show_models(chosen, by))


def _show_models(models: Sequence[dict[str, Any]], by: str | None) -> None:
    if not models:
        click.echo("no models")
        return
    if by is None:
        display.table([_COLUMNS, *map(_row, models)])
        return
    groups = {name for model in models for name in _GROUPS[by](model)}
    order = [name for name, _ in _SIZES if name in groups] if by == "size" else sorted(groups - {_UNSTATED})
    for name in (*order, *(groups & {_UNSTATED})):
        own = [model for model in models if name in _GROUPS[by](model)]
        click.echo(f"{printable(name)}: {display.counted(len(own), 'model')}")
        display.table([_COLUMNS, *map(_row, own)])
        click.echo()


def _row(model: dict[str, Any]) -> tuple[str, ...]:
    return (
        model["model_id"],
        ", ".join(model.get("tasks", ())),
        ", ".join(model.get("languages", ())),
        display.rounded_size(model.get("download_bytes", 0)),
        _variants(model),
        model.get("source", ""),
    )


def _size(model: dict[str, Any]) -> str:
    count = model.get("download_bytes", 0)
    return next(name for name, most in _SIZES if count <= most) if count else _UNSTATED


def _variants(listed: dict[str, Any]) -> str:
    targets = [
        f"{variant['model']}={variant['weight']}" if "weight" in variant else variant["model"]
        for variant in listed.get("alias", ())
    ]
    return f"alias of {', '.join(targets)}" if targets else ", ".join(listed.get("profiles", ()))


@click.command()
@click.argument("model", metavar="ID")
@service_options
def show(cluster: Cluster, model: str, output: str | None) -> None:
    """Print the configuration of model ID. It has the form that `sie models add` and `set -f` read. Its revision is
    printed to standard error.
    """
    with service_of(cluster, writes=False) as service:
        answer = service.read(path_of(model), dict[str, Any])
    if answer.revision is not None:
        click.echo(f"{model} is at revision {answer.revision}", err=True)
    print_body(answer.body, output or "yaml", lambda: display.table([("FIELD", "VALUE"), *_flat(answer.body, "")]))


@click.command()
@click.argument("model", metavar="ID")
@service_options
def history(cluster: Cluster, model: str, output: str | None) -> None:
    """List the revisions of model ID, newest first. Each line says who wrote the revision, and what it changed.

    `sie models rollback ID REVISION` writes an old revision again as the newest.
    """
    with service_of(cluster, writes=False) as service:
        body = service.read(path_of(model, "/history"), ModelHistory).plain
    rows = [
        (
            str(revision["revision"]),
            revision["operation"],
            revision["created_at"],
            revision["author"],
            revision["note"] or _changes(revision["changes"]),
        )
        for revision in body["revisions"]
    ]
    print_body(body, output, lambda: display.table([("REVISION", "OPERATION", "AT", "AUTHOR", "CHANGES"), *rows]))


def _changes(changes: list[dict[str, Any]]) -> str:
    parts = [
        f"{change['path'].removeprefix('$').removeprefix('.') or 'model'}: {shown(change.get('before', UNSET))} -> "
        f"{shown(change.get('after', UNSET))}"
        for change in changes
    ]
    more = f", and {len(parts) - MAX_CHANGES} more" if len(parts) > MAX_CHANGES else ""
    return ", ".join(parts[:MAX_CHANGES]) + more


@click.command()
@click.argument("model", metavar="ID")
@service_options
def status(cluster: Cluster, model: str, output: str | None) -> None:
    """Show which revision of model ID each gateway and worker has."""
    with service_of(cluster, writes=False) as service:
        body = service.read(path_of(model, "/status"), ModelRevisions).plain
    print_body(body, output, lambda: _show_status(body))


def _show_status(body: dict[str, Any]) -> None:
    if body["no_bundles"]:
        model = printable(body["model_id"])
        click.echo(f"{model}: no bundle can serve it, see `sie models show {model}` for its family and bundle")
        return
    lag = [worker for bundle in body["bundles"] for worker in bundle.get("pending_workers", ())]
    count = sum(bundle.get("total_eligible_workers", 0) for bundle in body["bundles"])
    served = f"all of {count} workers have it" if count else "no worker is up; each worker that starts gets it"
    # Workers do not load aliases, so the reply for an alias has no bundle (the model families of one worker image). The
    # reply has only the gateways.
    if not body["bundles"]:
        lag = [process["id"] for process in body.get("gateways", ()) if not process["acked"]]
        served = f"all of {len(body.get('gateways', ()))} gateways have it"
    state = f"waiting for {', '.join(lag)}" if lag else served
    text = f"revision {body.get('revision', '-')} from {body['source']}, epoch {body['config_epoch']}: {state}"
    click.echo(printable(f"{body['model_id']}: {text}"))
    readers = [("gateway", process) for process in body.get("gateways", [])] + [
        ("worker", process) for process in body.get("workers", [])
    ]
    rows = [
        (
            kind,
            process["id"],
            process.get("bundle", "-"),
            str(process.get("revision") or "-"),
            "yes" if process.get("acked") else "no",
            process.get("state", "-"),
            process.get("fingerprint") or "-",
        )
        for kind, process in readers
    ]
    if rows:
        display.table([("KIND", "NAME", "BUNDLE", "REVISION", "PRESENT", "STATE", "FINGERPRINT"), *rows])


@click.command("set")
@click.argument("model", metavar="ID")
@click.argument("changes", metavar="[FIELD=VALUE]...", nargs=-1)
@click.option(
    "-f",
    "--file",
    "file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Replace the whole configuration by FILE; - is standard input.",
)
@write_options("Write the model even if this makes an alias invalid.")
def set_command(write: WriteOptions, model: str, changes: tuple[str, ...], file: Path | None) -> None:
    """Change model ID: some fields, or all with -f. Gateways and workers use the change within a second.

    \b
    sie models set org/model max_tokens=256 run.normalize=false
    sie models set org/model profiles.first.run.pooling=cls
        another pooling as a profile, in addition to the model's own vectors
    sie models set org/model run.pooling=cls load.accept_unproven=true
        another pooling than the model's files state, for the model's own vectors
    sie models set org/model 'profiles.short.run.dimensions=[64]' run.instruction=null     null removes a field
    sie models set org/model 'profiles."v1.5".run.normalize=false'
        quotes around a name with dots
    sie models show org/model > m.yaml; edit m.yaml; sie models set org/model -f m.yaml --if-match 3
    """
    if bool(changes) == (file is not None):
        raise click.UsageError("give FIELD=VALUE, or a whole configuration with -f FILE")
    if file is not None:
        method, body, content_type = "PUT", *document(file)
    else:
        method, body, content_type = "PATCH", msgspec.json.encode(patch_of(changes)), JSON
    report_write(write, write.send(method, path_of(model), body, content_type))


@click.command()
@click.argument("model", metavar="ID")
@write_options("Remove the model even if an alias needs it.")
def rm(write: WriteOptions, model: str) -> None:
    """Remove model ID. Its history is kept: `sie models rollback` restores the model."""
    report_write(write, write.send("DELETE", path_of(model)), removed=True)


@click.command()
@click.argument("model", metavar="ID")
@click.argument("revision", type=click.IntRange(1))
@write_options("Write the model even if this makes an alias invalid.")
def rollback(write: WriteOptions, model: str, revision: int) -> None:
    """Restore REVISION of model ID. It is written again as the newest revision; `sie models history ID` lists the
    revisions. This also restores a removed model.
    """
    report_write(write, write.send("POST", path_of(model, "/rollback"), msgspec.json.encode({"revision": revision})))


def document(file: Path) -> tuple[bytes, str]:
    """Read a configuration from a file, or from standard input if `file` is `-`. Return its bytes and content type.
    Raises UsageError.
    """
    try:
        body = sys.stdin.buffer.read(MAX_BYTES + 1) if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise click.UsageError(f"{file}: {error.strerror}") from error
    return body, JSON if file.suffix == ".json" else YAML


def patch_of(changes: Sequence[str]) -> dict[str, Any]:
    """Convert arguments FIELD=VALUE to a JSON merge patch. Raises BadParameter."""
    patch: dict[str, Any] = {}
    for change in changes:
        path, equals, raw = change.partition("=")
        names = _names(path)
        if not equals or not names:
            raise click.BadParameter(
                f"{change[:60]!r}: expected FIELD=VALUE such as run.pooling=mean", param_hint="FIELD=VALUE"
            )
        try:
            value = yaml_text.load(raw)
        except yaml_text.NotYAML as error:
            example = f"{path}='\"text\"'"
            message = f"{path}: the value is {error.message}; a text is quoted twice: {example}"
            raise click.BadParameter(message, param_hint="FIELD=VALUE") from error
        if isinstance(value, dict) and not raw.lstrip().startswith("{"):
            value = raw  # a plain text that YAML reads as a map, such as the prompt `query: {text}`
        inner = patch
        for name in names[:-1]:
            inner = inner.setdefault(name, {})
            if not isinstance(inner, dict):
                raise click.BadParameter(f"{path}: {name} already has a value", param_hint="FIELD=VALUE")
        if names[-1] in inner:
            raise click.BadParameter(f"{path}: occurs twice", param_hint="FIELD=VALUE")
        inner[names[-1]] = value
    return patch


def _names(path: str) -> list[str]:
    """Split a path such as `profiles."v1.5".run` into its keys. Return an empty list if the path is invalid."""
    names, at = [], 0
    while (match := _SEGMENT.match(path, at)) is not None:
        names.append(match[1] or match[2])
        at = match.end()
        if not match[3]:
            return names
    return []


def report_write(write: WriteOptions, answer: ServiceReply, *, removed: bool = False) -> None:
    """Print the reply to a write: the new revision and the changes, or the planned changes in a dry run."""
    written: Written = answer.body

    def lines() -> None:
        where = f"at revision {written.revision}" + (", removed" if removed else "")
        model = printable(written.model_id)
        click.echo(f"dry run, nothing is stored: {model} would be {where}" if write.dry_run else f"{model} is {where}")
        if written.created_profiles:
            click.echo(printable(f"new profiles: {', '.join(written.created_profiles)}"))
        if written.existing_profiles_skipped and not written.created_profiles and not removed:
            click.echo(printable(f"unchanged profiles: {', '.join(written.existing_profiles_skipped)}"))

    print_body(answer.plain, write.output, lines)
    for warning in written.warnings:
        click.echo(f"warning: {printable(warning)}{_WARNINGS.get(warning, '')}", err=True)


_WARNINGS = {
    "nats_publish_partial": ": the change is stored; some gateways and workers see it only at their next poll",
    "nats_publish_failed": ": the change is stored; gateways and workers see it only at their next poll",
    "alias_vectors_changed": (
        ": the alias now gives other vectors, which do not fit those in an existing index; build the index again"
    ),
    "alias_broken": ": an alias names a model that no longer exists; name another model in the alias",
}


def print_body(body: Any, output: str | None, table: Any) -> None:
    """Print the body of a reply as `output` (json or yaml). For another `output`, call `table` to print a table."""
    if output == "json":
        click.echo(display.document(body))
    elif output == "yaml":
        click.echo(yaml.safe_dump(body, sort_keys=False, allow_unicode=True, width=130), nl=False)
    else:
        table()


def _flat(value: Any, path: str) -> list[tuple[str, str]]:
    if isinstance(value, dict) and value:
        return [row for key, inner in value.items() for row in _flat(inner, f"{path}.{key}" if path else str(key))]
    return [(path, value if isinstance(value, str) else msgspec.json.encode(value).decode())]


COMMANDS = (list_command, show, history, status, set_command, rm, rollback)
