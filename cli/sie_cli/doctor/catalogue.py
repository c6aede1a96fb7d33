"""The config service, who follows its catalogue, and the folder of models."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from sie_cli.display import counted
from sie_cli.doctor.finding import CheckResult, Finding
from sie_cli.doctor.gateway import FORBIDDEN
from sie_cli.doctor.look import ClusterProbe, NotApplicable
from sie_contracts.errors import SIEError
from sie_contracts.models.trust import is_bucket
from sie_contracts.settings import SettingError, public_url
from sie_contracts.wire.configs import ConfigEpoch, has_seen

DRIFT_S = 5.0  # that a write of the catalogue takes at most to everybody, on a busy machine


async def config(look: ClusterProbe) -> CheckResult:
    """That the config service answers, and that everybody serves by its catalogue."""
    reply = await look.config()
    url = await look.config_url()
    fix = (
        "start it (`sie config`); where it is: SIE_CONFIG_SERVICE_URL of gateways and workers. They serve on by what "
        "they have"
    )
    if reply.trouble:
        return "", [Finding(f"no config service answers at {reply.url}: {reply.trouble}", fix)]
    if not reply.is_sie:
        return "", [Finding(f"what answers at {reply.url} is no config service", f"set SIE_CONFIG_SERVICE_URL: {fix}")]
    if reply.status in FORBIDDEN and look.config_token is not None:
        wrong = f"the config service at {reply.url} refuses this token (status {reply.status})"
        return "", [
            Finding(
                wrong, "set SIE_CONFIG_READ_TOKEN (or SIE_ADMIN_TOKEN) to the value that it has at the config service"
            )
        ]
    if reply.status not in (200, *FORBIDDEN):
        return "", [
            Finding(
                f"the config service at {reply.url} answers {reply.status}",
                "its log says why; it needs the broker above all",
            )
        ]
    beats = await look.heartbeats()
    end_s = time.monotonic() + DRIFT_S
    while True:
        epoch = look.epoch_of(reply)
        gateways = {name: beat.config_epoch for name, beat in beats.gateways.items() if beat.config_epoch}
        workers = {
            name: (beat.bundle, beat.config_epoch)
            for name, beat in beats.workers.items()
            if not beat.leaving and beat.config_epoch
        }
        findings = drift(epoch, gateways, workers)
        if not findings or time.monotonic() > end_s:
            break
        beats.came.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await beats.came.wait()
        reply = await look.ask_config() if epoch else reply
    if epoch is not None:
        findings += await restored(look, reply.url)
    says = f"{counted(len(gateways), 'gateway')} and {counted(len(workers), 'worker')}"
    if epoch is None:
        return (
            (
                f"{says} agree; the epoch at {public_url(url)} takes SIE_CONFIG_READ_TOKEN and SIE_CONFIG_SERVICE_URL "
                "to be read"
            ),
            findings,
        )
    return f"{says} serve by epoch {epoch.epoch}", findings


async def restored(look: ClusterProbe, url: str) -> list[Finding]:
    """Models whose newest revision could not be loaded, so that the one before it serves again."""
    answer = await look.get(url, "/v1/configs/models", look.config_token)
    fix = "correct the entry and write it again (sie models history ID, sie models set ID)"
    models = msgspec.convert(answer.json().get("models", []), list[dict[str, Any]]) if answer.status == 200 else []
    return [Finding(f"{model['model_id']}: {model['note']}", fix) for model in models if model.get("note")]


def drift(
    epoch: ConfigEpoch | None, gateways: Mapping[str, str], workers: Mapping[str, tuple[str, str]]
) -> list[Finding]:
    """Who is behind the catalogue: gateways by name with their epoch, workers with their bundle and epoch.

    A worker is behind when a write that concerns its bundle is missing. Without `epoch`, the config service's word,
    gateways are compared with each other, and workers by the bucket alone: which writes concern them is not known then.
    """
    latest = epoch.epoch if epoch else max(gateways.values(), key=_writes, default="")
    findings = [
        _drifted(f"gateway {name}", stands, latest)
        for name, stands in sorted(gateways.items())
        if not has_seen(stands, latest)
    ]
    for name, (bundle, stands) in sorted(workers.items()):
        if epoch is not None:
            expected = epoch.bundles.get(bundle) or epoch.epoch
            if not has_seen(stands, expected):
                findings.append(_drifted(f"worker {name}", stands, expected))
        elif latest and stands.rpartition(":")[0] != latest.rpartition(":")[0]:
            findings.append(_drifted(f"worker {name}", stands, latest))
    return findings


def _writes(epoch: str) -> int:
    last = epoch.rpartition(":")[2]
    return int(last) if last.isdigit() else -1


def _drifted(name: str, stands: str, expected: str) -> Finding:
    return Finding(
        f"{name} serves by an older catalogue: epoch {stands}, wanted {expected}",
        f"restart {name}; that it follows again, compare its SIE_CONFIG_SERVICE_URL, SIE_CONFIG_READ_TOKEN and "
        "SIE_NATS_CONFIG_TRUSTED_PRODUCERS with the others'",
    )


async def models(look: ClusterProbe) -> CheckResult:
    """The folder of models that the local `sie serve` reads: one file that is refused keeps all of it back."""
    from sie_config_service.overlay import Overlay

    access = look.cluster.local()
    folder = access.models_dir if access is not None else ""
    if not folder or is_bucket(folder):
        raise NotApplicable("nothing that runs here reads a folder of models")
    if not await asyncio.to_thread(Path(folder).is_dir):  # the default one, which need not be there
        raise NotApplicable(f"there is no {folder}, so the models are those of the package")
    try:
        folders = await asyncio.to_thread(Overlay(dataclasses.replace(look.settings, models_dir=folder)).folders)
    except (SIEError, SettingError, OSError) as error:
        fix = "mend or remove it; until then the models stay as they were before the last change of the folder"
        return "", [Finding(f"{folder}: {error}", fix)]
    return f"{counted(len(folders.files), 'model')} in {folder}", []
