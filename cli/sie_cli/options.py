"""Settings as command-line options: one option per setting, made from the settings table."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import click

from sie_contracts.runtime import failpoints
from sie_contracts.runtime.process import EXIT_BAD_SETTING, configure_logging
from sie_contracts.settings import ROWS, Loaded, Mode, Row, SettingError, load, shown

F = TypeVar("F", bound=Callable[..., Any])
ALIASES = {"SIE_PRELOAD_MODELS": "--preload"}


def settings_options(*components: str) -> Callable[[F], F]:
    """Add an option for every setting that one of the components reads. Secrets are left out: they would show in process lists."""

    def decorate(function: F) -> F:
        for row in reversed(ROWS):
            if row.name.startswith("SIE_") and not row.secret and not set(components).isdisjoint(row.components):
                function = _option(row)(function)
        return click.option("--failpoints", hidden=True, callback=_failpoints, help=failpoints.__doc__)(function)

    return decorate


def _option(row: Row) -> Callable[[F], F]:
    text = f"{row.meaning} [{row.name}; default: {shown(row, row.default)}]"
    names = [row.flag, *([ALIASES[row.name]] if row.name in ALIASES else [])]
    if isinstance(row.default, bool):
        return click.option(f"{row.flag}/--no-{row.flag[2:]}", row.field, default=None, help=text)
    return click.option(*names, row.field, default=None, metavar="VALUE", help=text)


def _failpoints(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    try:
        failpoints.parse(value or "")
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    return value


def flags_of(values: dict[str, Any]) -> dict[str, str]:
    """The raw text of the setting flags that were given, by variable name."""
    rows = {row.field: row for row in ROWS}
    given = {name: value for name, value in values.items() if name in rows and value is not None}
    return {rows[name].name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in given.items()}


def loaded(values: dict[str, Any], mode: Mode = "queue") -> Loaded:
    """All settings; a bad one ends the process with status 2 and its name. Warnings go to standard error."""
    try:
        found = load(flags=flags_of(values), mode=mode)
    except SettingError as error:
        refuse(error)
    if found.settings.log_json:
        configure_logging(json=True)
    failpoints.arm(values.get("failpoints") or "")
    for warning in found.warnings:
        if found.settings.log_json:
            logging.getLogger("sie.settings").warning("%s", warning)
        else:
            click.echo(f"warning: {warning}", err=True)
    return found


def refuse(error: Exception) -> NoReturn:
    click.echo(f"error: {error}", err=True)
    sys.exit(EXIT_BAD_SETTING)
