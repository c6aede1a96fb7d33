"""The command: all checks at once, each for so long and no longer; then what they found."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import click
import msgspec

from sie_broker import BrokerError
from sie_cli.cluster import Cluster, data_dir_option
from sie_cli.display import counted
from sie_cli.doctor.checks import CHECKS
from sie_cli.doctor.finding import Check, Finding
from sie_cli.doctor.gpu import PROBE_S
from sie_cli.doctor.look import Absent, Blind, Look, looking
from sie_cli.doctor.settings import check_settings, faults_of
from sie_cli.options import ManyOptions, flags_of, refuse, settings_options
from sie_contracts.settings import SettingError, load

CHECK_S = 30.0
FINE, WRONG, BLIND = 0, 1, 2
State = Literal["fine", "wrong", "absent", "blind"]
_SHOWN: Mapping[State, tuple[str, str]] = {
    "fine": ("ok", "green"),
    "wrong": ("WRONG", "red"),
    "absent": ("-", "bright_black"),
    "blind": ("not seen", "yellow"),
}


class Report(msgspec.Struct, frozen=True):
    """Of one check. `state`: fine, wrong, absent (nothing to look at), blind (it could not look). `says`: the line
    beside it.
    """

    check: str
    state: State
    says: str
    findings: list[Finding] = []


@click.command(cls=ManyOptions, short_help="What is wrong with a cluster, and what mends it.")
@data_dir_option
@click.option("--json", "as_json", is_flag=True, help="One JSON document, for programs.")
@settings_options("gateway", "config", "sidecar", "adapter", url="SIE_GATEWAY_URL")
def doctor(data_dir: Path | None, as_json: bool, **values: Any) -> None:
    """Say what is wrong with a cluster and this machine's part of it, and what mends each thing. It changes nothing.

    \b
    sie doctor                                         a `sie serve` of this machine
    sie doctor --url URL --nats-url nats://...         a cluster; SIE_AUTH_TOKEN, SIE_CONFIG_READ_TOKEN as its processes
                                                       have them

    Give it the settings of the processes: it looks for what they would meet. What it is not told, broker and config
    service, it asks the gateway for. It looks at settings, ports, gateways and their workers, the broker, streams and
    consumers, who is behind the catalogue, models that do not load, the sockets of adapters, GPU, disks, clocks and
    versions.

    Status 0: nothing is wrong. 1: something is. 2: nothing was found, but not all could be looked at.
    """
    logging.getLogger("sie.broker").addHandler(logging.NullHandler())  # what matters of it is a finding
    values.pop("failpoints", None)
    try:
        reports = asyncio.run(examined(flags_of(values), os.environ, data_dir))
    except SettingError as error:
        refuse(error)
    status = status_of(reports)
    if as_json:
        told = {
            "status": {FINE: "fine", WRONG: "wrong", BLIND: "blind"}[status],
            "checks": [_plain(each) for each in reports],
        }
        click.echo(msgspec.json.format(msgspec.json.encode(told)).decode())
    else:
        show(reports)
    sys.exit(status)


def _plain(report: Report) -> dict[str, Any]:
    findings = [finding._asdict() for finding in report.findings]
    return {"check": report.check, "state": report.state, "says": report.says, "findings": findings}


async def examined(flags: Mapping[str, str], environ: Mapping[str, str], named: Path | None) -> list[Report]:
    """The reports of all checks, in their order. `named` is a data directory that was asked for. Raises SettingError
    for a wrong one.
    """
    faults, good_flags, good_environ = faults_of(flags, environ)
    cluster = Cluster.of(load(flags=good_flags, environ=good_environ), named, required=False)
    checks: dict[str, Check] = {"settings": check_settings(faults, good_flags, good_environ), **CHECKS}
    async with looking(cluster) as look:
        return list(await asyncio.gather(*(_report(name, check, look) for name, check in checks.items())))


async def _report(name: str, check: Check, look: Look) -> Report:
    limit_s = PROBE_S + 1.0 if name == "gpu" else CHECK_S
    try:
        async with asyncio.timeout(limit_s):
            says, findings = await check(look)
    except Absent as absent:
        return Report(name, "absent", str(absent))
    except Blind as blind:
        return Report(name, "blind", str(blind))
    except TimeoutError:
        return Report(name, "blind", f"no end within {limit_s:g} s")
    except BrokerError as error:
        return Report(name, "blind", f"the broker went away meanwhile: {error}")
    return Report(name, "wrong" if findings else "fine", "" if findings else says, findings)


def status_of(reports: list[Report]) -> int:
    states = {each.state for each in reports}
    return WRONG if "wrong" in states else BLIND if "blind" in states else FINE


def show(reports: list[Report]) -> None:
    """Print for people: each check, under it what is wrong and the fix."""
    width = max(len(each.check) for each in reports)
    for each in reports:
        word, colour = _SHOWN[each.state]
        click.echo(f"{each.check:<{width}}  ", nl=False)
        click.secho(f"{word:<8}", fg=colour, nl=False)
        click.echo(f"  {each.says}" if each.says else "")
        for finding in each.findings:
            click.secho(f"  {finding.wrong}", bold=True)
            click.echo(f"    fix: {finding.fix}")
    found = sum(len(each.findings) for each in reports)
    blind = [each.check for each in reports if each.state == "blind"]
    what = counted(found, "finding") if found else "nothing is wrong" if not blind else "nothing wrong was found"
    click.echo(f"\n{what}" + (f"; not looked at: {', '.join(blind)}" if blind else ""))
