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
from sie_cli.doctor.look import CheckSkipped, ClusterProbe, NotApplicable, open_probe
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


class CheckReport(msgspec.Struct, frozen=True):
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
        document = {
            "status": {FINE: "fine", WRONG: "wrong", BLIND: "blind"}[status],
            "checks": [_plain(report) for report in reports],
        }
        click.echo(msgspec.json.format(msgspec.json.encode(document)).decode())
    else:
        show(reports)
    sys.exit(status)


def _plain(report: CheckReport) -> dict[str, Any]:
    findings = [finding._asdict() for finding in report.findings]
    return {"check": report.check, "state": report.state, "says": report.says, "findings": findings}


async def examined(flags: Mapping[str, str], environ: Mapping[str, str], named: Path | None) -> list[CheckReport]:
    """The reports of all checks, in their order. `named` is a data directory that was asked for. Raises SettingError
    for a wrong one.
    """
    faults, good_flags, good_environ = faults_of(flags, environ)
    cluster = Cluster.of(load(flags=good_flags, environ=good_environ), named, required=False)
    checks: dict[str, Check] = {"settings": check_settings(faults, good_flags, good_environ), **CHECKS}
    async with open_probe(cluster) as look:
        return list(await asyncio.gather(*(_report(name, check, look) for name, check in checks.items())))


async def _report(name: str, check: Check, look: ClusterProbe) -> CheckReport:
    limit_s = PROBE_S + 1.0 if name == "gpu" else CHECK_S
    try:
        async with asyncio.timeout(limit_s):
            says, findings = await check(look)
    except NotApplicable as absent:
        return CheckReport(name, "absent", str(absent))
    except CheckSkipped as blind:
        return CheckReport(name, "blind", str(blind))
    except TimeoutError:
        return CheckReport(name, "blind", f"no end within {limit_s:g} s")
    except BrokerError as error:
        return CheckReport(name, "blind", f"the broker went away meanwhile: {error}")
    return CheckReport(name, "wrong" if findings else "fine", "" if findings else says, findings)


def status_of(reports: list[CheckReport]) -> int:
    states = {report.state for report in reports}
    return WRONG if "wrong" in states else BLIND if "blind" in states else FINE


def show(reports: list[CheckReport]) -> None:
    """Print for people: each check, under it what is wrong and the fix."""
    width = max(len(report.check) for report in reports)
    for entry in reports:
        word, colour = _SHOWN[entry.state]
        click.echo(f"{entry.check:<{width}}  ", nl=False)
        click.secho(f"{word:<8}", fg=colour, nl=False)
        click.echo(f"  {entry.says}" if entry.says else "")
        for finding in entry.findings:
            click.secho(f"  {finding.wrong}", bold=True)
            click.echo(f"    fix: {finding.fix}")
    count = sum(len(report.findings) for report in reports)
    blind = [report.check for report in reports if report.state == "blind"]
    summary = counted(count, "finding") if count else "nothing is wrong" if not blind else "nothing wrong was found"
    click.echo(f"\n{summary}" + (f"; not looked at: {', '.join(blind)}" if blind else ""))
