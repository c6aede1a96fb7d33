"""All checks by name, each of one part: what is wrong, and the command or the setting that mends it.

A check returns what it may say when nothing is wrong, and its findings. It raises Absent where there is nothing to look
at, Blind where it could not look. No check changes anything.
"""

from __future__ import annotations

from sie_cli.doctor.agreement import clock, versions
from sie_cli.doctor.broker import broker, streams
from sie_cli.doctor.catalogue import config, models
from sie_cli.doctor.damage import damage
from sie_cli.doctor.finding import Check
from sie_cli.doctor.gateway import gateway
from sie_cli.doctor.gpu import gpu
from sie_cli.doctor.loads import loads
from sie_cli.doctor.machine import disk, sockets
from sie_cli.doctor.ports import ports

CHECKS: dict[str, Check] = {
    "ports": ports,
    "gateway": gateway,
    "broker": broker,
    "streams": streams,
    "damage": damage,
    "config": config,
    "models": models,
    "loads": loads,
    "sockets": sockets,
    "gpu": gpu,
    "disk": disk,
    "clock": clock,
    "versions": versions,
}
