"""Descriptions of models and aliases for the API, with the reports of workers. No function here loads a model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from sie_contracts.errors import BundleConflict, ModelNotFound
from sie_contracts.models import families
from sie_contracts.models.aliases import Alias
from sie_contracts.models.catalogue import Catalogue, Resolved
from sie_contracts.models.entries import EXTRACTS, ModelEntry, classifies, listed_outputs, needs_labels, widths
from sie_contracts.places import without_paths
from sie_contracts.wire.heartbeats import Heartbeat, ModelStatus, ServedEngine, ServedPrecision
from sie_gateway.fleet.lanes import Fleet
from sie_gateway.inference.shadow import ShadowStatistics

Measured = Callable[[str, str], ShadowStatistics]
"""Function that returns what this gateway measured about a shadow model, which gets copies of an alias's requests. Its
arguments are the names of the alias and of the shadow model."""
_SLICE = 50  # number of models that are described (in 1 to 2 ms) before other tasks may run


def model_info(catalogue: Catalogue, fleet: Fleet, entry: ModelEntry, profile: str = "default") -> dict[str, Any]:
    """Return a model with a profile as ModelInfo. For a profile other than `default`, `variant_of` names the model."""
    resolved = catalogue.resolve_profile(entry, profile, entry.id)
    state, reports = fleet.model(resolved.residency)
    hosts = [_host(beat, status) for beat, status in reports]
    fingerprint = next((status.fingerprint for _, status in reports if status.fingerprint), None)
    certificate = next((status.certificate for _, status in reports if status.certificate), None)
    loaded = sorted(beat.worker for beat, status in reports if status.state == "loaded")
    engine = _served(resolved.load.engine, [status.engine for _, status in reports])
    precisions = [status.precision for _, status in reports]
    requested: str | None = resolved.load.precision or next(
        (report.requested for report in precisions if report and report.requested), None
    )
    info: dict[str, Any] = {
        "name": resolved.canonical,
        "id": resolved.canonical,
        "object": "model",
        "created": 0,
        "owned_by": entry.id.partition("/")[0],
        "inputs": list(entry.inputs),
        "outputs": listed_outputs(entry),
        "tasks": list(entry.tasks),
        "dims": widths(entry, resolved.run),
        "loaded": state == "loaded",
        "state": state,
        "last_error": next((host["error"] for host in hosts if host["error"] is not None), None),
        "max_sequence_length": entry.max_tokens,
        "profiles": _profiles(entry),
        "bundles": list(catalogue.bundles_of(entry)),
        "worker_count": len(loaded),
        "workers": loaded,
        "hosts": hosts,
        "matryoshka_dims": list(resolved.run.dimensions) if resolved.run.dimensions else None,
        "score_scale": score_scale(entry),
        "supports_lora": families.row(entry.family).takes_lora,
        "needs_labels": needs_labels(entry),
        "extracts": [name for name in EXTRACTS if name in entry.outputs],
        "options": sorted(families.row(entry.family).parameters),
        "prompts": sorted(entry.prompts),
        "prompt_texts": entry.prompts,
        "revision": entry.revision,
        "license": entry.license,
        "languages": list(entry.languages),
        "description": entry.description,
        "certificate": certificate,
        "precision": _served(requested, precisions),
        "fingerprint": fingerprint,
        "downloads": [
            {"worker": worker, **msgspec.structs.asdict(download)}
            for worker, download in fleet.downloads(resolved.residency)
        ],
        "engine": engine,
        "backend": ", ".join(engine["served"]) or "torch",
        "capabilities": _capabilities(entry),
        "model_type": _model_type(entry),
        "stats": {"queue_absolute": sum(status.queued for _, status in reports)},
        "on_disk": entry.id in fleet.on_disk(),
        "download_bytes": entry.download_bytes or None,
    }
    if profile != "default":
        info["variant_of"] = entry.id
    return info


def _served(requested: str | None, reports: Sequence[ServedPrecision | ServedEngine | None]) -> dict[str, Any]:
    """Return the requested precision or engine (None: nothing requested), the precisions or engines that workers serve,
    and the reasons why these differ from the requested one.
    """
    reported = [report for report in reports if report is not None]
    return {
        "requested": requested,
        "served": sorted({report.served for report in reported}),
        "reason": "; ".join(sorted({report.reason for report in reported if report.reason})) or None,
    }


def _capabilities(entry: ModelEntry) -> list[str]:
    """Return what the model can do, in Infinity's words: embed, rerank, classify."""
    can = {"embed": "dense" in entry.outputs, "rerank": "score" in entry.tasks, "classify": classifies(entry)}
    return [name for name, on in can.items() if on]


def _model_type(entry: ModelEntry) -> str:
    """Return the type of a model in Xinference's words. Its clients choose by it what a model can be called for."""
    if "encode" in entry.tasks:
        return "embedding"
    if "score" in entry.tasks:
        return "rerank"
    return "audio" if "audio" in entry.inputs else "flexible"


def _host(beat: Heartbeat, status: ModelStatus) -> dict[str, Any]:
    error = status.error
    return {
        "worker": beat.worker,
        "state": status.state,
        "memory_bytes": status.memory_bytes,
        "load_s": status.load_s,
        "queued": status.queued,
        "error": None
        if error is None
        else {
            "code": error.extras.get("error_class", "UNKNOWN"),
            "attempts": error.extras.get("attempts", 1),
            "permanent": error.extras.get("permanent", False),
            "message": error.message,
        },
    }


def _profiles(entry: ModelEntry) -> dict[str, Any]:
    """Return for each profile the settings in which it differs from the default profile."""
    default = Catalogue.resolve_profile(entry, "default", entry.id)
    return {name: _profile(default, entry, name) for name in ("default", *entry.profiles)}


def _profile(default: Resolved, entry: ModelEntry, name: str) -> dict[str, Any]:
    own = Catalogue.resolve_profile(entry, name, entry.id)
    run = own.run
    changes = {**_differing(default.load, own.load), **_differing(default.run, run)}
    if "lora" in changes and run.lora:
        changes["lora"] = without_paths(run.lora)
    return {
        "is_default": name == "default",
        "changes": changes,
        **({"output_types": list(run.output_types)} if run.output_types else {}),
        **({"lora_id": without_paths(run.lora)} if run.lora else {}),
    }


def _differing(default: msgspec.Struct, own: msgspec.Struct) -> dict[str, Any]:
    return {
        name: msgspec.to_builtins(value)
        for name in own.__struct_fields__
        if (value := getattr(own, name)) != getattr(default, name)
    }


def score_scale(entry: ModelEntry) -> str | None:
    """Return the scale of the model's scores. None if the model returns no scores, or if only the model's files define
    the scale: a gateway does not read them.
    """
    if "score" not in entry.tasks:
        return None
    family = families.row(entry.family)
    if family.reads_answer:
        return "logit" if entry.head.score in ("difference", "logit") else "probability"
    if family.gives_vectors:
        return "cosine" if "score" in entry.outputs else "maxsim"
    return {"identity": "logit", None: None}.get(entry.head.activation, "probability")


async def model_list(
    catalogue: Catalogue,
    fleet: Fleet,
    *,
    task: str = "",
    output: str = "",
    loaded: bool = False,
    variants: bool = True,
    text: str = "",
    limit: int | None = None,
    figures: Measured,
) -> tuple[list[dict[str, Any]], int]:
    """Return (at most `limit` matching models, number of all matching models). The models are ordered by name, each
    followed by its variants; the aliases are last.

    `text` selects models: each of its words must occur in the name or in the entry's description, license, tasks,
    inputs or outputs, in upper or lower case. If `task`, `output` and `loaded` are not set, models beyond `limit` are
    counted without building their descriptions.
    """
    names = listed_names(catalogue, text.lower().split(), variants=variants)
    if loaded:
        reported = fleet.reported()
        names = [(name, profile) for name, profile in names if profile is None or name.partition(":")[0] in reported]
    picks = bool(task or output or loaded)
    infos: list[dict[str, Any]] = []
    for number, (name, profile) in enumerate(names, 1):
        if profile is None:
            alias = catalogue.aliases[name]
            resolved = catalogue.resolve(alias.heaviest.model, follow=False)
            infos.append(alias_info(model_info(catalogue, fleet, resolved.entry, resolved.profile), alias, figures))
        else:
            infos.append(model_info(catalogue, fleet, catalogue.entries[name], profile))
        if number == limit and not picks:
            break
        if number % _SLICE == 0:
            await asyncio.sleep(0)
    if picks:
        infos = [
            info
            for info in infos
            if (not task or task in info["tasks"])
            and (not output or output in info["outputs"])
            and (not loaded or info["loaded"])
        ]
    return infos[:limit], len(infos) if picks else len(names)


def listed_names(catalogue: Catalogue, words: Sequence[str], *, variants: bool) -> list[tuple[str, str | None]]:
    """Return pairs (id of the entry, profile) by name, then a pair (name, None) for each usable alias. All of `words`
    must occur in the name or, for an entry, in its description, license, tasks, inputs or outputs.
    """
    names: list[tuple[str, str | None]] = []
    for _, entry in sorted(catalogue.entries.items()):
        about = (
            " ".join((entry.description, entry.license, *entry.tasks, *entry.inputs, *entry.outputs)) if words else ""
        )
        for profile in ("default", *(sorted(entry.profiles) if variants else ())):
            name = entry.id if profile == "default" else f"{entry.id}:{profile}"
            if not words or all(word in f"{name} {about}".lower() for word in words):
                names.append((entry.id, profile))
    for _, alias in sorted(catalogue.aliases.items()):
        if all(word in alias.id.lower() for word in words):
            with contextlib.suppress(ModelNotFound, BundleConflict):  # an alias whose model was removed is not listed
                catalogue.resolve(alias.heaviest.model, follow=False)
                names.append((alias.id, None))
    return names


def alias_info(info: dict[str, Any], alias: Alias, figures: Measured) -> dict[str, Any]:
    """Return an alias as ModelInfo. `info`: ModelInfo of the target with the largest weight (share of requests).
    Add the list of targets and the shadow model.
    """
    fields: dict[str, Any] = {"targets": [{"model": target.model, "weight": target.weight} for target in alias.alias]}
    if alias.shadow is not None:
        model = alias.shadow.model
        fields["shadow"] = {"model": model, "share": alias.shadow.share, "figures": figures(alias.id, model).as_map()}
    rest = {name: value for name, value in info.items() if name not in ("variant_of", "owned_by")}
    return {**rest, "name": alias.id, "id": alias.id, "owned_by": alias.id.partition("/")[0], "alias": fields}
