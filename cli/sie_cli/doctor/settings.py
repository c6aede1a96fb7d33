"""Settings that cannot be read, contradict each other or have no effect."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

from sie_cli.display import counted
from sie_cli.doctor.finding import Check, CheckResult, Finding
from sie_cli.doctor.look import ClusterProbe
from sie_contracts.settings import BY_NAME, Mode, SettingError, load


def faults_of(
    flags: Mapping[str, str], environ: Mapping[str, str]
) -> tuple[list[Finding], dict[str, str], dict[str, str]]:
    """What is wrong with single settings, then flags and environment without what cannot be read."""
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
        if name.startswith("SIE_") and name not in BY_NAME:
            near = difflib.get_close_matches(name, BY_NAME, n=1, cutoff=0.75)
            fix = (
                f"did you mean {near[0]}? `sie settings` shows all"
                if near
                else f"unset {name}; `sie settings` shows all"
            )
            findings.append(Finding(f"{name} is set, but no such setting exists", fix))
    while fault := _contradiction(*readable):
        findings.append(Finding(fault, "change one of the two that it names"))
        named = re.findall(r"[A-Z][A-Z0-9]*_[A-Z0-9_]+", fault)
        if sum(left.pop(name, None) is not None for left in readable for name in named) == 0:
            raise AssertionError(f"defaults that contradict each other: {fault}")
    return findings, *readable


def _contradiction(flags: Mapping[str, str], environ: Mapping[str, str]) -> str:
    """Of two settings, each of which can be read; empty where there is none."""
    try:
        load(flags=flags, environ=environ)
    except SettingError as error:
        return str(error)
    return ""


def check_settings(faults: list[Finding], flags: Mapping[str, str], environ: Mapping[str, str]) -> Check:
    """Of what `faults_of` found, and of what is set in vain."""

    async def check(look: ClusterProbe) -> CheckResult:
        mode: Mode = "standalone" if await look.is_standalone() else "queue"
        idle = [
            Finding(warning, f"unset {warning.partition(' ')[0]}")
            for warning in load(flags=flags, environ=environ, mode=mode).warnings
            if "no such setting" not in warning
        ]
        count = sum(source in ("flag", "environment") for source in look.cluster.sources.values())
        says = (
            f"{counted(count, 'setting')} given, each of them right"
            if count
            else "none is given: the defaults are in force"
        )
        return says, [*faults, *idle]

    return check
