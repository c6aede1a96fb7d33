"""Command `sie`: one command for every process of the cluster, and for its inspection."""

from __future__ import annotations

import atexit
import contextlib
import difflib
import functools
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import click
import msgspec

import sie_contracts
from sie_cli.options import (
    DRAIN,
    LAME_DUCK,
    SPARE,
    AnyPosition,
    Commands,
    ManyOptions,
    loaded,
    refuse,
    settings_options,
)
from sie_cli.refusal import INTERRUPTED
from sie_contracts.errors import SIEError
from sie_contracts.settings import ROWS, SettingError, default_worker_id, shown
from sie_runtime.process import Stop, own_stderr
from sie_runtime.process import run as run_process


class _Program(AnyPosition):
    """Group that ends the process when called. `main`, which tests call, raises SystemExit like every group."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Return the command. Raises UsageError, with the group of a name that only exists in that group."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            for group, command in self.commands.items():
                if isinstance(command, click.Group) and args[0] in command.commands:
                    raise click.UsageError(
                        f"No such command '{args[0]}'. Did you mean `sie {group} {args[0]}`?", ctx
                    ) from None
            if like := difflib.get_close_matches(args[0], self.commands, 1):
                raise click.UsageError(f"No such command '{args[0]}'. Did you mean `sie {like[0]}`?", ctx) from None
            raise

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Ctrl-C ends the process with the status of a shell, also while the command is imported."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo(err=True)  # the line of ^C
            raise SystemExit(INTERRUPTED) from None

    def __call__(self, *args: Any, **options: Any) -> Any:
        try:
            return super().__call__(*args, **options)
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if not package or package.startswith("sie_"):
                raise
            extra = next((EXTRAS[word] for word in sys.argv[1:] if word in EXTRAS), "serve")
            refuse(f"the package {package} is not installed: pip install 'sie-cluster[{extra}]'")
        except SystemExit as ended:
            # With torch imported, the interpreter needs a second to end. Threads of the object store's runtime outlive
            # it, and a thread that calls it meanwhile aborts the process.
            if not isinstance(ended.code, int | None):
                raise
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            with contextlib.suppress(BrokenPipeError):  # the reader of the pipe has closed it
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(ended.code or 0)


# extras for commands that need other packages than `serve`
EXTRAS = {"gateway": "gateway", "config": "config", "sidecar": "sidecar", "adapter": "adapter", "eval": "evals"}
ELSEWHERE = {
    "serve": "sie_cli.serve.command:serve",
    "airgap": "sie_cli.airgap:airgap",
    "backup": "sie_cli.recovery:backup",
    "dlq": "sie_cli.dlq:dlq",
    "doctor": "sie_cli.doctor:doctor",
    "eval": "sie_cli.evals:evals",
    "jobs": "sie_cli.jobs:jobs",
    "keys": "sie_cli.keys:keys",
    "migrate": "sie_cli.migrating:migrate",
    "models": "sie_cli.models:models",
    "bench": "sie_cli.replay.bench:bench",
    "pull": "sie_cli.models.pull:pull",
    "repair": "sie_cli.recovery:repair",
    "restore": "sie_cli.recovery:restore",
    "run": "sie_cli.trying:run_model",
    "top": "sie_cli.top.command:top",
    "try": "sie_cli.trying:try_model",
    "topology": "sie_cli.topology:topology",
    "weights": "sie_cli.models.weights:weights",
}


@click.group(
    cls=_Program,
    commands=Commands(ELSEWHERE),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 140},
)
@click.version_option(sie_contracts.__version__, prog_name="sie")
def main() -> None:
    """SIE: encode, score and extract with the small models behind search and RAG.

    \b
    sie serve                  the whole cluster on this machine
    sie serve MODEL            the same with a model of the catalogue, an id of the Hugging Face Hub, or a folder
    sie serve --standalone     the same without a broker
    sie run MODEL "text"       what a model answers; one that is missing is added to the server that runs
    sie pull MODEL             a model into the catalogue, and its weights onto this disk
    sie settings               every setting, its value and where it came from
    sie doctor                 what is wrong with a cluster, and what mends it
    sie try MODEL "text"       what a model answers, shown for a person
    sie jobs submit MODEL FILE work on whole files; `watch`, `pause`, `cancel`, `retry` and `result` of a job
    sie migrate ALIAS MODEL    an alias moves to another encoder; the corpus is encoded anew before
    sie top                    workers, models and queues, live
    sie dlq list               work that was given up
    sie keys create NAME       a token for a client; `list` and `revoke` it
    sie models inspect DIR     what a model folder is; `sie models add` puts it into the catalogue, `sie models set`
                               changes it there
    sie weights push MODEL     weights into the bucket that all workers share; `list`, `verify` and `rm` them
    sie airgap create          models for a site without a network, in one file; `load` and `serve` them there
    sie eval MODEL -t TASK     how good a model is, beside other servers and what is expected
    sie bench replay TRACE     what other settings would do to recorded or generated traffic
    sie backup FILE            keys, catalogue and jobs in one file; `sie restore FILE` writes them back
    sie repair STREAM          a stream anew whose files are damaged, which `sie doctor` names
    sie topology show          streams and consumers at the broker; `check` compares them, `migrate` changes them
    """


@main.command()
def version() -> None:
    """Return the version as `sie --version` prints it."""
    click.echo(f"sie, version {sie_contracts.__version__}")


def _run(json: bool, body: Callable[[Stop], Coroutine[Any, Any, int]]) -> None:
    own_stderr(json=json)
    try:
        sys.exit(run_process(body))
    except (SettingError, SIEError) as error:
        refuse(error)


@main.command(cls=ManyOptions)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    default=8080,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="Port of the API; 0 picks a free one.",
)
@click.option("--nats-monitor-url", default=None, help="Monitor of the broker, shown in /health.")
@click.option(
    "--drain-s", default=None, type=click.FloatRange(0), help=f"{DRAIN}  [default: SIE_GATEWAY_REQUEST_TIMEOUT]"
)
@click.option("--lame-duck-s", default=0.0, show_default=True, type=click.FloatRange(0), help=LAME_DUCK)
@click.option("--data-dir", default=None, type=click.Path(path_type=Path), help="Of the `sie serve` it is a part of.")
@settings_options("gateway")
def gateway(host: str, port: int, **values: Any) -> None:
    """The HTTP edge: validates, routes, queues, collects."""
    from sie_gateway.process import run

    own = {name: values.pop(name) for name in ("nats_monitor_url", "drain_s", "lame_duck_s", "data_dir")}
    settings = loaded(values).settings
    _run(settings.log_json, functools.partial(run, settings, host=host, port=port, **own))


@main.command(cls=ManyOptions, short_help="The config service: writes the catalogue.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    default=8081,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="Port of the config API; 0 picks a free one.",
)
@click.option("--lame-duck-s", default=0.0, show_default=True, type=click.FloatRange(0), help=LAME_DUCK)
@settings_options("config")
def config(host: str, port: int, lame_duck_s: float, **values: Any) -> None:
    """The config service: the catalogue's only writer."""
    from sie_config_service.process import run

    settings = loaded(values).settings
    _run(settings.log_json, lambda stop: run(settings, stop, host=host, port=port, lame_duck_s=lame_duck_s))


@main.command(cls=ManyOptions)
@click.option("--host", default="0.0.0.0", show_default=True, help="Address of the probes and metrics.")
@click.option(
    "--record-trace",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Append what runs to a trace for `sie bench replay`.",
)
@click.option("--drain-s", default=None, type=click.FloatRange(0), help=f"{DRAIN}  [default: 9]")
@settings_options("sidecar")
def sidecar(host: str, record_trace: Path | None, drain_s: float | None, **values: Any) -> None:
    """The worker's scheduler: pulls, tokenises, batches, settles."""
    from sie_sidecar.device import recording
    from sie_sidecar.process import run

    settings = loaded(values).settings
    if record_trace is not None:
        try:
            recording.begin(record_trace, settings)
        except OSError as error:
            refuse(error)
    try:
        _run(settings.log_json, lambda stop: run(settings, stop, host=host, drain_s=drain_s))
    finally:
        recording.end()


@main.command(cls=ManyOptions)
@click.option("--spare/--no-spare", default=True, show_default=True, help=SPARE)
@settings_options("adapter")
def adapter(spare: bool, **values: Any) -> None:
    """The worker's engine: holds models, runs forward passes."""
    from sie_adapter.process import run

    settings = loaded(values).settings
    own_stderr(json=settings.log_json, worker=settings.worker_id or default_worker_id())
    try:
        sys.exit(run(settings, spare=spare))
    except SettingError as error:
        refuse(error)


@main.command("settings", cls=ManyOptions)
@click.option("--standalone", is_flag=True, help="As `sie serve --standalone` would read them.")
@click.option("--json", "as_json", is_flag=True, help="One JSON array, for programs.")
@settings_options("gateway", "config", "sidecar", "adapter")
def settings_command(standalone: bool, as_json: bool, **values: Any) -> None:
    """Every setting: its value, where that came from, what it means. Secrets are shown as stars."""
    loaded_settings = loaded(values, "standalone" if standalone else "queue")
    rows = [
        {
            "name": row.name,
            "value": shown(row, getattr(loaded_settings.settings, row.field)),
            "source": loaded_settings.sources[row.name],
            "default": shown(row, row.default),
            "flag": row.flag if row.name.startswith("SIE_") and not row.secret else "",
            "read_by": list(row.components),
            "expects": row.expected,
            "meaning": row.meaning,
            "waits_for": row.waits_for,
        }
        for row in ROWS
    ]
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(rows)))
        return
    for row in rows:
        default = "" if row["source"] == "default" else f", default {row['default']}"
        waits = f" (not read yet: waits for {row['waits_for']})" if row["waits_for"] else ""
        click.secho(f"{row['name']}={row['value']}", bold=True, nl=False)
        click.echo(f"  [{row['source']}{default}]")
        click.echo(f"    {row['meaning']}{waits}")


@main.command(hidden=True, context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def standalone(arguments: tuple[str, ...]) -> None:
    """The in-process part of `sie serve --standalone`; imported only when it is asked for."""
    from sie_cli.serve.standalone import standalone as command

    command.main(list(arguments), prog_name="sie standalone")
