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
from sie_cli.doctor.finding import Finding, Found
from sie_cli.doctor.gateway import FORBIDDEN
from sie_cli.doctor.look import Absent, Look
from sie_contracts.errors import SIEError
from sie_contracts.models.trust import is_bucket
from sie_contracts.settings import SettingError, public_url
from sie_contracts.wire.configs import ConfigEpoch, has_seen

DRIFT_S = 5.0  # that a write of the catalogue takes at most to everybody, on a busy machine


async def config(look: Look) -> Found:
    """That the config service answers, and that everybody serves by its catalogue."""
    told = await look.config()
    url = await look.config_url()
    fix = (
        "start it (`sie config`); where it is: SIE_CONFIG_SERVICE_URL of gateways and workers. They serve on by what "
        "they have"
    )
    if told.trouble:
        return "", [Finding(f"no config service answers at {told.url}: {told.trouble}", fix)]
    if not told.is_sie:
        return "", [Finding(f"what answers at {told.url} is no config service", f"set SIE_CONFIG_SERVICE_URL: {fix}")]
    if told.status in FORBIDDEN and look.config_token is not None:
        wrong = f"the config service at {told.url} refuses this token (status {told.status})"
        return "", [
            Finding(
                wrong, "set SIE_CONFIG_READ_TOKEN (or SIE_ADMIN_TOKEN) to the value that it has at the config service"
            )
        ]
    if told.status not in (200, *FORBIDDEN):
        return "", [
            Finding(
                f"the config service at {told.url} answers {told.status}",
                "its log says why; it needs the broker above all",
            )
        ]
    heard = await look.heard()
    end_s = time.monotonic() + DRIFT_S
    while True:
        epoch = look.epoch_of(told)
        gateways = {name: beat.config_epoch for name, beat in heard.gateways.items() if beat.config_epoch}
        workers = {
            name: (beat.bundle, beat.config_epoch)
            for name, beat in heard.workers.items()
            if not beat.leaving and beat.config_epoch
        }
        findings = drift(epoch, gateways, workers)
        if not findings or time.monotonic() > end_s:
            break
        heard.came.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await heard.came.wait()
        told = await look.ask_config() if epoch else told
    if epoch is not None:
        findings += await restored(look, told.url)
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


async def restored(look: Look, url: str) -> list[Finding]:
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
    found = [
        _drifted(f"gateway {name}", stands, latest)
        for name, stands in sorted(gateways.items())
        if not has_seen(stands, latest)
    ]
    for name, (bundle, stands) in sorted(workers.items()):
        if epoch is not None:
            wanted = epoch.bundles.get(bundle) or epoch.epoch
            if not has_seen(stands, wanted):
                found.append(_drifted(f"worker {name}", stands, wanted))
        elif latest and stands.rpartition(":")[0] != latest.rpartition(":")[0]:
            found.append(_drifted(f"worker {name}", stands, latest))
    return found


def _writes(epoch: str) -> int:
    last = epoch.rpartition(":")[2]
    return int(last) if last.isdigit() else -1


def _drifted(who: str, stands: str, wanted: str) -> Finding:
    return Finding(
        f"{who} serves by an older catalogue: epoch {stands}, wanted {wanted}",
        f"restart {who}; that it follows again, compare its SIE_CONFIG_SERVICE_URL, SIE_CONFIG_READ_TOKEN and "
        "SIE_NATS_CONFIG_TRUSTED_PRODUCERS with the others'",
    )


async def models(look: Look) -> Found:
    """The folder of models that the local `sie serve` reads: one file that is refused keeps all of it back."""
    from sie_config_service.overlay import Overlay

    access = look.cluster.local()
    folder = access.models_dir if access is not None else ""
    if not folder or is_bucket(folder):
        raise Absent("nothing that runs here reads a folder of models")
    if not await asyncio.to_thread(Path(folder).is_dir):  # the default one, which need not be there
        raise Absent(f"there is no {folder}, so the models are those of the package")
    try:
        found = await asyncio.to_thread(Overlay(dataclasses.replace(look.settings, models_dir=folder)).folders)
    except (SIEError, SettingError, OSError) as error:
        fix = "mend or remove it; until then the models stay as they were before the last change of the folder"
        return "", [Finding(f"{folder}: {error}", fix)]
    return f"{counted(len(found.files), 'model')} in {folder}", []
