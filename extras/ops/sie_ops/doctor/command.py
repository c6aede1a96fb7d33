"""Command `sie doctor`: run all checks at once, each with a time limit, and then print their findings."""

from __future__ import annotations

import asyncio
import difflib
import logging
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from sie_broker import BrokerError
from sie_cli.cluster import SOURCE, Cluster, data_dir_option
from sie_cli.display import counted, document, printable
from sie_cli.options import ManyOptions, flags_of, refuse, settings_options
from sie_contracts import client_environment
from sie_contracts.settings import BY_NAME, Mode, SettingError, load
from sie_ops.doctor import checks, machine
from sie_ops.doctor.probe import Check, CheckResult, CheckSkipped, ClusterProbe, NotApplicable
from sie_ops.doctor.report import DoctorCheck
from sie_ops.doctor.report import DoctorFinding as Finding

# matches a `sie` command without --url and --data-dir in the text of a remedy, so that --data-dir can be added
_COMMAND = re.compile(r"`(sie (?:models|keys|jobs|doctor)\b(?:(?!--data-dir|--url)[^`])*)`")


def faults_of(
    flags: Mapping[str, str], environ: Mapping[str, str]
) -> tuple[list[Finding], dict[str, str], dict[str, str]]:
    """Return findings, and the flags and the environment without the invalid and contradictory settings. Each invalid
    or unknown setting, and each contradiction between two settings, is a finding.
    """
    findings: list[Finding] = []
    readable: tuple[dict[str, str], dict[str, str]] = ({}, {})
    for values, left in zip((flags, environ), readable, strict=True):
        for name, raw in values.items():
            if name in BY_NAME:
                try:
                    BY_NAME[name].read(raw)
                except SettingError as error:
                    findings.append(Finding(str(error), f"set {name} to {BY_NAME[name].expected}, or unset it"))
                    continue
            left[name] = raw
    for name in sorted(environ):
        if name.startswith("SIE_") and name not in BY_NAME and name not in client_environment.NAMES:
            near = difflib.get_close_matches(name, BY_NAME, n=1, cutoff=0.75)
            fix = f"unset {name}; `sie settings` lists all settings"
            if near:
                fix = f"did you mean {near[0]}? `sie settings` lists all settings"
            findings.append(Finding(f"{name} is set, but no such setting exists", fix))
    while fault := _contradiction(*readable):
        findings.append(Finding(fault, "change one of the two settings"))
        named = re.findall(r"[A-Z][A-Z0-9]*_[A-Z0-9_]+", fault)
        if sum(left.pop(name, None) is not None for left in readable for name in named) == 0:
            raise AssertionError(f"two default values contradict each other: {fault}")
    return findings, *readable


def _contradiction(flags: Mapping[str, str], environ: Mapping[str, str]) -> str:
    """Return the error text if two valid settings contradict each other, else an empty string."""
    try:
        load(flags=flags, environ=environ)
    except SettingError as error:
        return str(error)
    return ""


def check_settings(faults: list[Finding], flags: Mapping[str, str], environ: Mapping[str, str]) -> Check:
    """Build the check of the settings. It reports `faults` (from `faults_of`), and settings without an effect."""

    async def check(probe: ClusterProbe) -> CheckResult:
        mode: Mode = "standalone" if await probe.is_standalone() else "queue"
        idle = [
            Finding(warning, f"unset {warning.partition(' ')[0]}")
            for warning in load(flags=flags, environ=environ, mode=mode).warnings
            if "no such setting" not in warning
        ]
        count = sum(source in ("flag", "environment") for source in probe.cluster.sources.values())
        says = f"{counted(count, 'setting')} set, all valid" if count else "no setting is set: all have their defaults"
        return says, [*faults, *idle]

    return check


# Checks by name, except the check of the settings. A check changes nothing. It returns its findings, and a text for the
# case that there are no findings. It raises NotApplicable if this cluster or machine has nothing to check, and
# CheckSkipped if the check is not possible.
CHECKS: dict[str, Check] = {
    "ports": machine.ports,
    "gateway": checks.gateway,
    "broker": checks.broker,
    "streams": checks.streams,
    "damage": checks.damage,
    "config": checks.config,
    "models": checks.models,
    "loads": checks.loads,
    "refusals": checks.refusals,
    "queue": checks.queue,
    "sockets": machine.sockets,
    "gpu": machine.gpu,
    "disk": machine.disk,
    "clock": checks.clock,
    "versions": checks.versions,
}


CHECK_S = 30.0
FINE, WRONG, BLIND = 0, 1, 2
_SHOWN: Mapping[str, tuple[str, str]] = {
    "fine": ("ok", "green"),
    "wrong": ("WRONG", "red"),
    "absent": ("-", "bright_black"),
    "blind": ("not seen", "yellow"),
}


@click.command(cls=ManyOptions, short_help="What is wrong with a cluster, and what mends it.")
@data_dir_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, for programs.")
@settings_options("gateway", "config", "sidecar", "adapter", url="SIE_GATEWAY_URL")
def doctor(data_dir: Path | None, as_json: bool, **values: Any) -> None:
    """Find the faults of a cluster and of this machine, and name the remedy of each. The command changes nothing.

    \b
    sie doctor                                         a `sie serve` of this machine
    sie doctor --url URL --nats-url nats://...         a cluster; set SIE_API_KEY, SIE_CONFIG_READ_TOKEN as
                                                       its processes have them

    Run the command with the settings of the processes, because it checks these settings. If the address of the broker
    or of the config service is not set, it asks the gateway for this address. The checks cover the cluster (gateways,
    workers, broker, config service), its work (models, queues, refused requests) and the machine
    (settings, ports, sockets of adapters, GPUs, disks, clocks, versions).

    Status 0: no fault. 1: at least one fault. 2: no fault was found, but some checks were not possible.
    """
    # without a handler, Python would print the broker's warnings; the checks report these faults as findings
    logging.getLogger("sie.broker").addHandler(logging.NullHandler())
    values.pop("failpoints", None)
    try:
        reports = asyncio.run(examined(flags_of(values), os.environ, data_dir))
    except SettingError as error:
        refuse(error)
    status = status_of(reports)
    if as_json:
        described = {"status": {FINE: "fine", WRONG: "wrong", BLIND: "blind"}[status], "checks": reports}
        click.echo(document(described))
    else:
        show(reports)
    sys.exit(status)


async def examined(flags: Mapping[str, str], environ: Mapping[str, str], named: Path | None) -> list[DoctorCheck]:
    """Run all checks. Return the report on the settings, then the other reports in the order of CHECKS. `named`: the
    data directory that the user named. Raises SettingError if the access file of a `sie serve` cannot be read.
    """
    faults, good_flags, good_environ = faults_of(flags, environ)
    cluster = Cluster.locate(load(flags=good_flags, environ=good_environ), named, required=False)
    all_checks: dict[str, Check] = {"settings": check_settings(faults, good_flags, good_environ), **CHECKS}
    async with ClusterProbe(cluster) as probe:
        return list(await asyncio.gather(*(_report(name, check, probe) for name, check in all_checks.items())))


async def _report(name: str, check: Check, probe: ClusterProbe) -> DoctorCheck:
    limit_s = machine.PROBE_S + 1.0 if name == "gpu" else CHECK_S
    try:
        async with asyncio.timeout(limit_s):
            says, findings = await check(probe)
    except NotApplicable as absent:
        return DoctorCheck(name, "absent", str(absent), [])
    except CheckSkipped as blind:
        return DoctorCheck(name, "blind", str(blind), [])
    except TimeoutError:
        return DoctorCheck(name, "blind", f"the check did not end within {limit_s:g} s", [])
    except BrokerError as error:
        return DoctorCheck(name, "blind", f"the broker failed during the check: {error}", [])
    except OSError as error:  # for example PermissionError, for a folder of another user
        return DoctorCheck(name, "blind", f"{error.filename or name}: {error.strerror or error}", [])
    option = probe.cluster.data_dir_option if SOURCE in probe.cluster.sources.values() else ""
    findings = [Finding(finding.wrong, _COMMAND.sub(rf"`\1{option}`", finding.fix)) for finding in findings]
    return DoctorCheck(name, "wrong" if findings else "fine", "" if findings else says, findings)


def status_of(reports: list[DoctorCheck]) -> int:
    states = {report.state for report in reports}
    return WRONG if "wrong" in states else BLIND if "blind" in states else FINE


def show(reports: list[DoctorCheck]) -> None:
    width = max(len(report.check) for report in reports)
    for entry in reports:
        word, colour = _SHOWN[entry.state]
        click.echo(f"{entry.check:<{width}}  ", nl=False)
        click.secho(f"{word:<8}", fg=colour, nl=False)
        click.echo(printable(f"  {entry.says}" if entry.says else "", lines=True))
        for finding in entry.findings:
            click.secho(printable(f"  {finding.wrong}", lines=True), bold=True)
            click.echo(printable(f"    fix: {finding.fix}", lines=True))
    count = sum(len(report.findings) for report in reports)
    blind = [report.check for report in reports if report.state == "blind"]
    summary = counted(count, "finding") if count else "nothing is wrong" if not blind else "nothing wrong was found"
    click.echo(f"\n{summary}" + (f"; not looked at: {', '.join(blind)}" if blind else ""))
