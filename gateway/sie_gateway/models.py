"""The models API: the catalogue as clients see it, with what the workers report. Never causes a load."""

from __future__ import annotations

from typing import Any

from sie_contracts import muvera
from sie_contracts.catalogue import VECTORS, Catalogue, ModelEntry, RunDefaults
from sie_contracts.options import LORA_FAMILIES
from sie_gateway.fleet import Fleet

_OUTPUTS = ("dense", "sparse", "multivector", "score", "json")


def model_info(catalogue: Catalogue, fleet: Fleet, entry: ModelEntry, profile: str = "default") -> dict[str, Any]:
    """One ModelInfo. A variant carries `variant_of`."""
    resolved = catalogue.resolve_profile(entry, profile, entry.id)
    state, reports = fleet.model(resolved.residency)
    error = next((status.error for _, status in reports if status.error is not None), None)
    fingerprint = next((status.fingerprint for _, status in reports if status.fingerprint), None)
    certificate = next((status.certificate for _, status in reports if status.certificate), None)
    loaded = sorted(beat.worker for beat, status in reports if status.state == "loaded")
    info: dict[str, Any] = {
        "name": resolved.canonical, "id": resolved.canonical, "object": "model", "created": 0, "owned_by": entry.id.partition("/")[0],
        "inputs": list(entry.inputs), "outputs": _outputs(entry), "tasks": list(entry.tasks),
        "dims": _dims(entry, resolved.run),
        "loaded": state == "loaded", "state": state,
        "last_error": None if error is None else {
            "code": error.extras.get("error_class", "UNKNOWN"), "attempts": error.extras.get("attempts", 1),
            "permanent": error.extras.get("permanent", False), "message": error.message,
        },
        "max_sequence_length": entry.max_tokens,
        "profiles": {"default": {"is_default": True}, **{name: {"is_default": False} for name in entry.profiles}},
        "bundles": [entry.bundle], "worker_count": len(loaded), "workers": loaded,
        "matryoshka_dims": list(resolved.run.dimensions) if resolved.run.dimensions else None, "score_scale": score_scale(entry),
        "supports_lora": entry.family in LORA_FAMILIES, "prompts": sorted(entry.prompts), "revision": entry.revision,
        "certificate": certificate,
        "fingerprint": fingerprint,
    }  # fmt: skip
    if profile != "default":
        info["variant_of"] = entry.id
    return info


def _outputs(entry: ModelEntry) -> list[str]:
    tasks = {"score": "score", "json": "extract"}
    return [name for name in _OUTPUTS if (tasks[name] in entry.tasks if name in tasks else name in entry.outputs)]


def _dims(entry: ModelEntry, run: RunDefaults) -> dict[str, int]:
    """The width of each vector; of a profile with MUVERA that of its result."""
    found = {name: width for name, width in entry.outputs.items() if name in VECTORS and width}
    if run.muvera and "multivector" in found:
        own = run.muvera if isinstance(run.muvera, dict) else {}
        found["dense"] = muvera.parse({**entry.head.muvera, **own} or True, None, "muvera").width(found["multivector"])
    return found


def score_scale(entry: ModelEntry) -> str | None:
    """What a score of this model means, None where it gives none or only its own files tell."""
    if "score" not in entry.tasks:
        return None
    if entry.family == "decoder-reranker":
        return "logit" if entry.head.score == "difference" else "probability"
    if entry.family == "text-encoder":
        return "cosine" if "score" in entry.outputs else "maxsim"
    return {"identity": "logit", None: None}.get(entry.head.activation, "probability")


def model_list(
    catalogue: Catalogue, fleet: Fleet, *, task: str = "", output: str = "", loaded: bool = False, variants: bool = True
) -> list[dict[str, Any]]:
    """All models in order of name, each followed by its variants."""
    infos = [
        model_info(catalogue, fleet, entry, profile)
        for _, entry in sorted(catalogue.entries.items())
        for profile in ("default", *(sorted(entry.profiles) if variants else ()))
    ]
    return [
        info
        for info in infos
        if (not task or task in info["tasks"]) and (not output or output in info["outputs"]) and (not loaded or info["loaded"])
    ]
