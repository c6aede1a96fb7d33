"""Command `sie`: one program that starts every process of a cluster, inspects a cluster and changes it."""

from __future__ import annotations

import atexit
import contextlib
import difflib
import errno
import functools
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import click
import msgspec

import sie_contracts
from sie_cli.display import printable
from sie_cli.options import (
    DRAIN,
    LAME_DUCK,
    SPARE,
    AnyPosition,
    Commands,
    ManyOptions,
    loaded,
    port_option,
    refuse,
    settings_options,
)
from sie_cli.refusal import INTERRUPTED
from sie_contracts.errors import SIEError
from sie_contracts.settings import ROWS, SettingError, default_worker_id, shown
from sie_runtime.process import Stop, own_stderr
from sie_runtime.process import run as run_process


class _Program(AnyPosition):
    """Group of all commands. A call of the group runs a command and ends the process by `os._exit`. Tests call the
    method `main` instead, which raises SystemExit.
    """

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Return the command. Raises UsageError, which suggests a group with this command, or a command of a similar
        name.
        """
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
        """Run the command. Ctrl-C ends the process with the status that shells use, also while the command's modules
        are imported.
        """
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo(err=True)  # end the line in which the terminal printed ^C
            raise SystemExit(INTERRUPTED) from None

    def __call__(self, *args: Any, **options: Any) -> Any:
        try:
            self._call(*args, **options)
        except SystemExit as ended:
            # End with os._exit: the normal exit takes a second if torch is imported. It may also abort the process,
            # because threads of the object store's library continue after the interpreter has ended, and call into it.
            if not isinstance(ended.code, int | None):
                raise
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            # a stream is None if its file was closed before this process started
            for stream in filter(None, (sys.stdout, sys.stderr)):
                with contextlib.suppress(OSError):  # the reader of a pipe may have closed it, or the disk is full
                    stream.flush()
            os._exit(ended.code or 0)

    def _call(self, *args: Any, **options: Any) -> None:
        """Run the command. Raises SystemExit, also if a package is missing, if a file or the output cannot be used, and
        if an argument is not valid UTF-8.
        """
        try:
            super().__call__(*args, **options)
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if not package or package.startswith("sie_"):
                raise
            refuse(f"the package {package} is not installed: pip install 'sie-cluster[{_extra_for(sys.argv[1:])}]'")
        except OSError as error:
            is_output = error.errno in _UNWRITABLE
            # Raise in a process of the cluster (gateway, sidecar, ...): such a process has its own excepthook, which
            # logs the error with the place in the code.
            if not (is_output or error.filename) or sys.excepthook is not sys.__excepthook__:
                raise
            place = error.filename or "the output cannot be written"
            with contextlib.suppress(OSError):
                click.echo(printable(f"Error: {place}: {error.strerror}"), err=True)
            sys.exit(1)
        except UnicodeEncodeError:
            for word in sys.argv[1:]:
                if word.encode(errors="replace").decode() != word:
                    refuse(f"the argument {word} is no text in UTF-8")
            raise


def _extra_for(words: Sequence[str]) -> str:
    """Return the extra of the package `sie-cluster` that the command among these words needs."""
    extras = EXTRAS | {entry.name: ",".join(entry.extras) for entry in entry_points(group="sie.commands")}
    return next((extras[word] for word in words if extras.get(word)), "serve")


_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
# command -> extra of the package `sie-cluster` that the command needs; commands that are not listed need `serve`
EXTRAS = {
    "gateway": "gateway",
    "config": "config",
    "sidecar": "sidecar",
    "adapter": "adapter",
}
ELSEWHERE = {
    "serve": "sie_cli.serve.command:serve",
    "keys": "sie_cli.keys:keys",
    "models": "sie_cli.models:models",
    "pull": "sie_cli.models.pull:pull",
    "run": "sie_cli.trying:run_model",
    "status": "sie_cli.status:status",
    "try": "sie_cli.trying:try_model",
    "weights": "sie_cli.models.weights:weights",
}


@click.group(
    cls=_Program,
    commands=Commands(ELSEWHERE, "sie.commands"),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 140},
)
@click.version_option(sie_contracts.__version__, prog_name="sie")
def main() -> None:
    """SIE: encode, score and extract with the small models behind search and RAG.

    Begin with `sie serve`, and `sie run MODEL "text"` in another terminal. `sie COMMAND --help` explains a command.

    \b
    sie serve                  the whole cluster on this machine
    sie serve MODEL            the same, with a model: of the catalogue, of the Hugging Face Hub, or in a folder
    sie serve --standalone     the same without a broker
    sie run MODEL "text"       print a model's answer; a missing model is added to the running server
    sie pull MODEL             add a model to the catalogue, and its weights to this disk
    sie settings               all settings, with value and origin
    sie try MODEL "text"       like `sie run`, but a missing model is an error
    sie status                 show workers, models and queues, once
    sie keys create NAME       create a token for a client; `list`, `revoke`
    sie models inspect DIR     describe a model folder; `sie models add` adds it to the catalogue, `sie models set`
                               changes it there
    sie weights push MODEL     copy weights to the bucket that all workers share; `list`, `verify`, `rm`
    """


@main.command()
def version() -> None:
    """Print the version, as `sie --version` does."""
    click.echo(f"sie, version {sie_contracts.__version__}")


def _run(json: bool, body: Callable[[Stop], Coroutine[Any, Any, int]]) -> None:
    own_stderr(json=json)
    try:
        sys.exit(run_process(body))
    except (SettingError, SIEError) as error:
        refuse(error)


@main.command(cls=ManyOptions)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@port_option(8080, "Port of the API")
@click.option("--nats-monitor-url", default=None, help="URL of the broker's monitoring server. /health shows it.")
@click.option(
    "--drain-s", default=None, type=click.FloatRange(0), help=f"{DRAIN}  [default: SIE_GATEWAY_REQUEST_TIMEOUT]"
)
@click.option("--lame-duck-s", default=0.0, show_default=True, type=click.FloatRange(0), help=LAME_DUCK)
@click.option(
    "--data-dir",
    default=None,
    type=click.Path(path_type=Path),
    help="Data folder of the `sie serve` that started this gateway.",
)
@settings_options("gateway")
def gateway(host: str, port: int, **values: Any) -> None:
    """Run the gateway. It validates HTTP requests, sends their work to workers over the queue, and returns the
    results.
    """
    from sie_gateway.process import run

    own = {name: values.pop(name) for name in ("nats_monitor_url", "drain_s", "lame_duck_s", "data_dir")}
    settings = loaded(values).settings
    _run(settings.log_json, functools.partial(run, settings, host=host, port=port, **own))


@main.command(cls=ManyOptions, short_help="The config service: writes the catalogue.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@port_option(8081, "Port of the config API")
@click.option("--lame-duck-s", default=0.0, show_default=True, type=click.FloatRange(0), help=LAME_DUCK)
@settings_options("config")
def config(host: str, port: int, lame_duck_s: float, **values: Any) -> None:
    """Run the config service: the only process that writes the catalogue."""
    from sie_config_service.process import run

    settings = loaded(values).settings
    _run(settings.log_json, lambda stop: run(settings, stop, host=host, port=port, lame_duck_s=lame_duck_s))


@main.command(cls=ManyOptions)
@click.option("--host", default="0.0.0.0", show_default=True, help="Address to listen on, for probes and metrics.")
@click.option("--drain-s", default=None, type=click.FloatRange(0), help=f"{DRAIN}  [default: 9]")
@settings_options("sidecar")
def sidecar(host: str, drain_s: float | None, **values: Any) -> None:
    """Run the sidecar of a worker. It pulls work, tokenises it, sends batches to the adapter, and publishes the
    results.
    """
    from sie_sidecar.process import run

    settings = loaded(values).settings
    _run(settings.log_json, lambda stop: run(settings, stop, host=host, drain_s=drain_s))


@main.command(cls=ManyOptions)
@click.option("--spare/--no-spare", default=True, show_default=True, help=SPARE)
@settings_options("adapter")
def adapter(spare: bool, **values: Any) -> None:
    """Run the adapter of a worker. It loads models and runs their forward passes."""
    from sie_adapter.process import run

    settings = loaded(values).settings
    own_stderr(json=settings.log_json, worker=settings.worker_id or default_worker_id())
    try:
        sys.exit(run(settings, spare=spare))
    except SettingError as error:
        refuse(error)


@main.command("settings", cls=ManyOptions)
@click.option("--standalone", is_flag=True, help="Show the settings as `sie serve --standalone` reads them.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array, for programs.")
@settings_options("gateway", "config", "sidecar", "adapter")
def settings_command(standalone: bool, as_json: bool, **values: Any) -> None:
    """Show all settings: value, origin and meaning. Secrets are shown as stars."""
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
        }
        for row in ROWS
    ]
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(rows)))
        return
    for row in rows:
        default = "" if row["source"] == "default" else f", default {row['default']}"
        click.secho(f"{row['name']}={row['value']}", bold=True, nl=False)
        click.echo(f"  [{row['source']}{default}]")
        click.echo(f"    {row['meaning']}")


@main.command(hidden=True, context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def standalone(arguments: tuple[str, ...]) -> None:
    """Run the in-process part of `sie serve --standalone`. The late import keeps other commands fast."""
    from sie_cli.serve.standalone import standalone as command

    command.main(list(arguments), prog_name="sie standalone")
