"""A catalogue of many models, which are copies of the packaged ones under other ids, and the time of its operations."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import msgspec
import pytest

from sie_broker.nats import connect
from sie_config_service.mirror import HeldModel
from sie_config_service.store import SEED_BATCH, CatalogueChange, normalised, open_store
from sie_contracts.errors import ModelNotFound
from sie_contracts.models.catalogue import Catalogue
from sie_contracts.models.entries import ModelEntry, parse_document
from sie_contracts.settings import load
from sie_contracts.wire import configs, messages
from sie_contracts.wire.configs import ConfigDelta, ConfigExport, ConfigModel
from sie_runtime.feed import packaged_catalogue


def entries(count: int) -> dict[str, ModelEntry]:
    """Return that many entries, each with an id of its own."""
    packaged = list(packaged_catalogue().entries.values())
    numbered = zip(range(count), itertools.cycle(packaged), strict=False)
    copies = (msgspec.structs.replace(entry, id=f"{entry.id}-{number}") for number, entry in numbered)
    return {entry.id: entry for entry in copies}


def export(count: int, epoch: str = "large:9") -> bytes:
    """Return the export of a config service with these entries."""
    bundles = tuple(msgspec.to_builtins(bundle) for bundle in packaged_catalogue().bundles.values())
    models = tuple(
        ConfigModel(name, normalised(entry), 1, ("default",), written=9) for name, entry in entries(count).items()
    )
    return msgspec.json.encode(ConfigExport(epoch, models, bundles))


async def fill(url: str, count: int) -> None:
    """Write the entries that the catalogue of this broker lacks, as if over the API."""
    broker = await connect(url, name="fill")
    try:
        store = await open_store(broker, load(environ={}, mode="queue").settings)
        held = (await store.snapshot()).held
        changes = [
            CatalogueChange(name, HeldModel(), normalised(entry), "api", "create")
            for name, entry in entries(count).items()
            if name not in held
        ]
        for start in range(0, len(changes), SEED_BATCH):
            await store.write(changes[start : start + SEED_BATCH], tell=start + SEED_BATCH >= len(changes))
    finally:
        await broker.close()


def median_us(action: Callable[[], object], rounds: int = 200) -> float:
    """Return the median processor time of a call in microseconds."""
    took = []
    for _ in range(rounds):
        begun = time.thread_time_ns()
        action()
        took.append(time.thread_time_ns() - begun)
    return statistics.median(took) / 1000


def resolving(catalogue: Catalogue) -> dict[str, float]:
    """Return the microseconds of a resolution by the form of the model's name."""
    plain = list(catalogue.entries)[len(catalogue.entries) // 2]
    with_profile = next(
        f"{name}:{list(entry.profiles)[-1]}" for name, entry in catalogue.entries.items() if len(entry.profiles) > 2
    )
    pinned = f"{plain}@{catalogue.entries[plain].revision}"
    names = {"id": plain, "id@revision": pinned, "id:profile": with_profile, "another case": plain.upper()}
    return {how: median_us(lambda name=name: catalogue.resolve(name)) for how, name in names.items()}  # type: ignore[misc]


def unknown_us(catalogue: Catalogue) -> float:
    """Return the microseconds to resolve an unknown name, with suggestions."""

    def refused() -> None:
        with pytest.raises(ModelNotFound, match="no model named"):
            catalogue.resolve("sentence-transformers/all-MiniLM-L6-v3x")

    return median_us(refused, 20)


def applying_us(catalogue: Catalogue) -> float:
    """Return the microseconds to decode, check and apply a delta that adds a model, and to resolve the model once."""
    raw = normalised(msgspec.structs.replace(next(iter(catalogue.entries.values())), id="new/model"))
    data = messages.encode(ConfigDelta("sie-config", "large:9", "large:12", "new/model", 1, raw))

    def applied() -> None:
        delta = configs.decode_delta(data)
        new = catalogue.with_model(delta.model, parse_document(delta.entry), delta.revision, delta.epoch)
        assert new.resolve("new/Model").entry.id == "new/model"

    return median_us(applied, 50)
