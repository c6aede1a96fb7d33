"""Command-line options for settings: one option per setting, created from the settings table."""

from __future__ import annotations

import importlib
import logging
import sys
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint
from typing import Any, NoReturn, TypeVar, cast

import click

from sie_cli.display import printable
from sie_contracts import entry_points
from sie_contracts.settings import BY_NAME, ROWS, Loaded, Mode, SettingError, SettingRow, load, shown
from sie_runtime import failpoints
from sie_runtime.process import EXIT_BAD_SETTING, own_stderr

F = TypeVar("F", bound=Callable[..., Any])
DATA_DIR = (
    "Data folder of a `sie serve` on this machine. The command reads the server's addresses and passwords there.  "
    "[default: ~/.local/share/sie]"
)
DRAIN = "Longest time in seconds to finish the requests in progress when the process ends."
LAME_DUCK = (
    "Seconds after SIGTERM in which the process still answers requests. It reports that it is not ready, and closes "
    "each connection after an answer, so that load balancers stop sending requests."
)
SPARE = (
    "Keep a spare process that has already imported the libraries. If an adapter dies, a fork of the spare process "
    "replaces it at once (Linux; some 100 MB a worker)."
)
_WARNED = "Print no warnings about settings, because the process that started this one has printed them."
ALIASES = {"SIE_PRELOAD_MODELS": "--preload"}


def port_option(default: int, meaning: str) -> Callable[[F], F]:
    """Return a decorator that adds the option --port of a process that listens."""
    text = f"{meaning}; 0 picks a free port."
    return click.option("--port", default=default, show_default=True, type=click.IntRange(0, 65535), help=text)


def settings_options(*components: str, url: str = "") -> Callable[[F], F]:
    """Return a decorator that adds an option for every setting SIE_* that one of the components reads. Secrets have no
    option, because process lists would show them. `url`: the setting that --url also sets.
    """

    def decorate(function: F) -> F:
        for row in reversed(ROWS):
            if row.name.startswith("SIE_") and not row.secret and not set(components).isdisjoint(row.components):
                function = (url_option(url, "gateway") if row.name == url else _option(row))(function)
        function = click.option("--warned", hidden=True, is_flag=True, help=_WARNED)(function)
        return click.option("--failpoints", hidden=True, callback=_failpoints, help=failpoints.__doc__)(function)

    return decorate


def named_options(*names: str) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        for name in reversed(names):
            function = _option(BY_NAME[name])(function)
        return function

    return decorate


URL = "Address of the {what}.  [{name}; default: that of the local `sie serve`]"
_ANYWHERE = ("--url", "--nats-url", "--gateway-url", "--config-service-url", "--data-dir", "--pool")


def url_option(name: str, subject: str) -> Callable[[F], F]:
    """Return a decorator that adds --url, the address of the server that a command calls. `name`: the setting with
    this address. The setting's own option, for example --gateway-url, means the same as --url.
    """
    row = BY_NAME[name]
    return click.option(
        "--url", row.flag, row.field, metavar="URL", default=None, help=URL.format(what=subject, name=name)
    )


class SettingOption(click.Option):
    def __init__(self, *args: Any, heading: str = "", **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.heading = heading


_ALL = "sie.help_all"
_HELP_ALL = "Show this help with the options for all settings."


def _help_all(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        context.meta[_ALL] = True
        click.echo(context.get_help())
        context.exit()


class ManyOptions(click.Command):
    """Command with options for many settings. --help shows the options in `first` under the heading FIRST, and then the
    command's own options.

    The options for the settings follow in groups, each in alphabetical order. If `first` is not empty, only --help-all
    shows these groups.
    """

    FIRST, OWN, ALL = "Most used options", "Options", "--help-all"

    def __init__(self, *args: Any, first: Sequence[str] = (), **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self._first = tuple(first)
        if first:
            self.params.append(
                click.Option(
                    [self.ALL], is_flag=True, is_eager=True, expose_value=False, callback=_help_all, help=_HELP_ALL
                )
            )

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, dict[str, tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                sections.setdefault(self._heading(param), {})[param.opts[0]] = record
        is_short = bool(self._first) and not ctx.meta.get(_ALL)
        headings = [self.FIRST, self.OWN, *(() if is_short else dict.fromkeys(row.heading for row in ROWS))]
        for heading in (title for title in headings if title in sections):
            order = self._first if heading == self.FIRST else sorted(sections[heading])
            with formatter.section(heading):
                formatter.write_dl([sections[heading][name] for name in order])

    def _heading(self, param: click.Parameter) -> str:
        if param.opts[0] in self._first:
            return self.FIRST
        return param.heading if isinstance(param, SettingOption) else self.OWN


class Commands(UserDict[str, Any]):
    """Commands of a group, by name. A value is a command, or its `module:attribute`, which is imported when the command
    is first used. So processes of the cluster do not import the modules of operators' commands. Commands of packages
    are found by the entry points of `group`, which are read when a name is not among the values, or to list all names.
    """

    def __init__(self, commands: Mapping[str, Any], group: str = "") -> None:
        super().__init__(commands)
        self._group = group

    def _read_entry_points(self) -> None:
        if self._group:
            group, self._group = self._group, ""
            self.data = {entry.name: entry for entry in entry_points.entries(group)} | self.data

    def __contains__(self, name: object) -> bool:
        if name not in self.data:
            self._read_entry_points()
        return name in self.data

    def __iter__(self) -> Iterator[str]:
        self._read_entry_points()
        return iter(self.data)

    def __len__(self) -> int:
        self._read_entry_points()
        return len(self.data)

    def __getitem__(self, name: str) -> click.Command:
        if name not in self:
            raise KeyError(name)
        command = self.data[name]
        if isinstance(command, str):
            module, _, attribute = command.partition(":")
            command = self.data[name] = getattr(importlib.import_module(module), attribute)
        elif isinstance(command, EntryPoint):
            command = self.data[name] = _of_package(command)
        return cast(click.Command, command)


def _of_package(entry: EntryPoint) -> click.Command:
    """Return the command of an entry point. If it cannot be imported, return one that says why."""
    try:
        return cast(click.Command, entry.load())
    except ModuleNotFoundError as error:
        cause = entry_points.remedy(entry, error)
    except Exception as error:  # noqa: BLE001  code of another package may raise anything; the other commands still run
        cause = f"{entry.value} cannot be imported: {type(error).__name__}: {error}"

    @click.command(entry.name, short_help=cause, context_settings={"ignore_unknown_options": True})
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def unusable(arguments: tuple[str, ...]) -> None:
        refuse(cause)

    return unusable


class AnyPosition(click.Group):
    """Group that accepts options of the cluster also before the name of a command: `sie --url URL dlq list`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, behind(args))


def behind(args: list[str]) -> list[str]:
    """Move the options of _ANYWHERE that precede the command's name to the end of the arguments, or directly before a
    `--`. Return all arguments.
    """
    lines: list[str] = []
    moved: list[str] = []
    rest = list(args)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        first = rest.pop(0)
        name, has_value, _ = first.partition("=")
        into = moved if name in _ANYWHERE else lines
        into.append(first)
        if into is moved and not has_value and rest:
            moved.append(rest.pop(0))
    if not rest:
        return args
    end = rest.index("--") if "--" in rest else len(rest)
    return [*lines, *rest[:end], *moved, *rest[end:]]


def _option(row: SettingRow) -> Callable[[F], F]:
    text = f"{row.meaning} [{row.name}; default: {shown(row, row.default)}]"
    names = [row.flag, *([ALIASES[row.name]] if row.name in ALIASES else [])]
    if isinstance(row.default, bool):
        names, metavar = [f"{row.flag}/--no-{row.flag[2:]}"], None
    else:
        metavar = "VALUE"
    return click.option(
        *names, row.field, cls=SettingOption, heading=row.heading, default=None, metavar=metavar, help=text
    )


def _failpoints(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    try:
        failpoints.parse(value or "")
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    return value


def flags_of(values: dict[str, Any]) -> dict[str, str]:
    """Return the flags that were set: name of the setting -> text of its value."""
    return {
        row.name: str(value).lower() if isinstance(value, bool) else str(value)
        for row in ROWS
        if (value := values.get(row.field)) is not None
    }


def loaded(values: dict[str, Any], mode: Mode = "queue") -> Loaded:
    """Return all settings. An invalid setting ends the process with status 2. Warnings go to standard error, in JSON if
    SIE_LOG_JSON is set. Also arms the failpoints (faults for tests) in `values`.
    """
    try:
        loaded_settings = load(flags=flags_of(values), mode=mode)
    except SettingError as error:
        refuse(error)
    if loaded_settings.settings.log_json:
        own_stderr(json=True)
    failpoints.arm(values.get("failpoints") or "")
    for warning in () if values.get("warned") else loaded_settings.warnings:
        if loaded_settings.settings.log_json:
            logging.getLogger("sie.settings").warning("%s", warning)
        else:
            click.echo(f"warning: {warning}", err=True)
    return loaded_settings


def refuse(error: Exception | str) -> NoReturn:
    click.echo(printable(f"error: {error}", lines=True), err=True)
    sys.exit(EXIT_BAD_SETTING)
