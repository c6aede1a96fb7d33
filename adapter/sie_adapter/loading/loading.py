"""Load of a model: a resolved catalogue entry becomes an object of its family.

  entry ──► folder of its weights ──► class of its family ──► loaded model, checked (`certificate`)

A family of another Python package is loaded by an entry point of the group `sie.adapters`, named like the family.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import importlib.metadata
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from msgspec.structs import replace

from sie_adapter.engine import device as devices
from sie_adapter.engine import engines
from sie_adapter.engine.device import Compute
from sie_adapter.engine.engines import TORCH, Choice, EngineFacts, Unserved
from sie_adapter.loading import certificate
from sie_adapter.loading.certificate import LoadCertificate
from sie_adapter.loading.load_key import LoadKeys
from sie_adapter.loading.precision import bfloat16_lacks, resolve_precision
from sie_adapter.loading.weight_files import check_weights
from sie_adapter.memory.device_errors import is_device_fatal, is_out_of_memory
from sie_adapter.memory.footprint import weight_bytes
from sie_adapter.packed import attention_backend
from sie_adapter.packed.tower_outputs import TowerOutputs
from sie_contracts.errors import ModelLoadFailed, SIEError
from sie_contracts.models import families
from sie_contracts.models.catalogue import Resolved
from sie_contracts.models.entries import ModelEntry, Precision
from sie_contracts.models.families import TEXT_ENCODER
from sie_contracts.models.load_errors import incompatible, load_failed
from sie_contracts.settings import Settings
from sie_store.weights import derived
from sie_store.weights.derived import DerivedFiles
from sie_store.weights.locks import Lock
from sie_store.weights.sources import Located, WeightSources

_logger = logging.getLogger("sie.adapter")

ENTRY_POINTS = "sie.adapters"
MAX_CERTIFICATES = 1000
_WEIGHTS = "weights"  # derived file that says that the weights were checked


def family_of(name: str) -> Any:
    """Return the class of a family. Raises ModelLoadFailed for an unknown name, ImportError if a package is missing."""
    if name in families.rows():
        module, _, attribute = families.row(name).implementation.partition(":")
        return getattr(importlib.import_module(module), attribute)
    plugins = {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}
    if name in plugins:
        return plugins[name].load()
    listed = ", ".join([*families.rows(), *sorted(plugins)])
    cause = f"this adapter has no family {name}, it has {listed}; a package adds one by the entry point {ENTRY_POINTS}"
    raise incompatible(cause)


def _family(resolved: Resolved) -> Any:
    entry = resolved.entry
    if entry.unproven and not resolved.load.accept_unproven:
        raise load_failed(
            "CERTIFICATE", f"{entry.id} is unproven: {entry.unproven}; set load.accept_unproven to load it anyway"
        )
    return family_of(entry.family)


@contextlib.contextmanager
def classed(entry: ModelEntry) -> Iterator[None]:
    """Convert exceptions in the context to ModelLoadFailed, except SIEErrors and errors of a lost device."""
    try:
        yield
    except SIEError:
        raise
    except ImportError as error:
        extra = families.row(entry.family).extra
        install = f"; pip install 'sie-cluster[{extra}]' installs what the family {entry.family} needs" if extra else ""
        raise load_failed(
            "DEPENDENCY",
            f"a package that {entry.id} needs is not installed in the adapter's environment, or its import fails: "
            f"{error}{install}",
        ) from error
    except Exception as error:
        if is_device_fatal(error):
            raise
        _logger.exception("loading %s failed", entry.id)
        if is_out_of_memory(error):
            fix = "a lower SIE_DEFAULT_COMPUTE_PRECISION, fewer models beside it or a larger device would help"
            raise load_failed("OOM", f"{entry.id}: the device has too little memory for it; {fix}") from error
        raise load_failed("UNKNOWN", f"{entry.id}: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Loader:
    device: torch.device
    sources: WeightSources
    settings: Settings
    outputs: TowerOutputs = field(default_factory=TowerOutputs)
    # (key of the load, engine, attention) -> certificate
    certificates: dict[tuple[str, ...], LoadCertificate] = field(default_factory=dict)
    _keys: LoadKeys = field(default_factory=LoadKeys)
    _checked: set[str] = field(default_factory=set)  # keys of loads whose weights were checked
    # warnings about precision that were already logged: the model, and the reason why it computes in another precision
    _reported: set[tuple[str, str]] = field(default_factory=set)
    # locks on the files of models that are being loaded, by `Resolved.residency`; a locked file is not removed from the
    # cache
    _leases: dict[str, Lock] = field(default_factory=dict)

    def compute(self, precision: Precision | None) -> Compute:
        """Return device, dtype and attention for models of this precision. `precision`: None for the default."""
        default = cast(Precision, self.settings.default_compute_precision)
        lacks = bfloat16_lacks() if self.device.type == "cpu" else ""
        dtype, reason = resolve_precision(precision, default, self.device.type, lacks=lacks)
        facts = attention_backend.attention_facts(self.device, dtype)
        attention = attention_backend.resolve_attention(self.settings.attention_backend, facts)
        return Compute(self.device, dtype, *attention, facts, precision or default, reason, self.outputs)

    def _compute_of(self, resolved: Resolved) -> Compute:
        """Return the settings (device, engine, precision) for the model, before its files are read. Raises
        ModelLoadFailed if the engine that the entry demands cannot run the model, or if no engine can run it.
        """
        compute = self.compute(resolved.load.precision)
        family = families.rows().get(resolved.entry.family)
        facts = EngineFacts(
            self.device.type,
            reads_text=family is not None and family.implementation == TEXT_ENCODER,
            lora=resolved.entry.run.lora or "",
            is_limited=devices.is_limited(),
            attention=compute.backend,
            settings=self.settings,
            int8=resolved.load.precision == "int8",
        )
        choice = engines.choose(resolved.load.engine, facts)
        return dataclasses.replace(compute, model=facts, engine=choice, int8=facts.int8)

    def _derived(self, folder: Path, resolved: Resolved, compute: Compute) -> DerivedFiles:
        """Return the files that loads with the same key have computed. Nothing is kept on the disk for code of a folder
        and for families of extras, which need libraries that the key does not have.
        """
        entry = resolved.entry
        golden = [path for path in [certificate.golden_file(entry)] if path.is_file()] if entry.golden else []
        key = self._keys.key_of(folder, golden, resolved, compute)
        # Files of a load can be as large as the weights. In /tmp they could exceed the pod's limit of storage, and
        # Kubernetes would evict the pod. So the load writes them into the cache folder if it is writable.
        place = self.settings.cache_folder / derived.FOLDER
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError:
            return DerivedFiles(None, key)
        if not os.access(place, os.W_OK):
            return DerivedFiles(None, key)
        is_kept = compute.model.reads_text and not resolved.load.trust_remote_code
        return DerivedFiles(place, key, is_kept=is_kept)

    def needed_bytes(self, resolved: Resolved) -> int:
        """Return the bytes that the weights need during the load: a CPU loads in float32, and another engine than torch
        may keep several copies. Fetches missing files. Raises the errors of `load`.
        """
        with classed(resolved.entry):
            # the family is checked first, so that nothing is downloaded for a model whose family is unknown
            _family(resolved)
            compute = self._compute_of(resolved)
            dtype = torch.float32 if self.device.type == "cpu" else compute.dtype
            rule = engines.rules()[compute.engine.engine]
            return rule.held_bytes(weight_bytes(self._located(resolved).folder, dtype.itemsize))

    def _located(self, resolved: Resolved) -> Located:
        located = self.sources.locate(resolved.entry)
        self._leases[resolved.residency] = located.lease
        return located

    def ended(self, resolved: Resolved) -> None:
        """Release the lock that a load has on the files of the model. A loaded model has a lock of its own on the files
        until it is unloaded or evicted.
        """
        self._leases.pop(resolved.residency, None)

    def load(self, resolved: Resolved) -> Any:
        """Return the loaded model. Raises ModelLoadFailed, another SIEError, or the error of a lost device."""
        with classed(resolved.entry):
            family = _family(resolved)
            compute = self._compute_of(resolved)
            located = self.sources.locate(resolved.entry)
            compute = dataclasses.replace(compute, derived=self._derived(located.folder, resolved, compute))
            self._check_weights(located.folder, resolved.entry, compute.derived)
            model = self._certified_model(family, located.folder, resolved, compute)
            model.lease = located.lease
            self._note_precision(model, resolved, compute)
            # length of a text at which attention takes as long as all other computation; 0 for a model without a
            # backbone, since the length is not known
            model.crossover_tokens = model.backbone.crossover_tokens if hasattr(model, "backbone") else 0
            return model

    def _certified_model(self, family: Any, folder: Path, resolved: Resolved, compute: Compute) -> Any:
        """Return the model on the engine that the rules select. If the engine does not support the model, or the model
        fails its checks on the engine, return the model on torch. Raises the error if the entry demands the engine.
        """
        try:
            model = family(folder, resolved.entry, resolved.load, compute)
        except Unserved as error:
            return self._on_torch(family, folder, resolved, compute, str(error))
        choice = model.backbone.engine if hasattr(model, "backbone") else compute.engine
        try:
            return self._with_certificate(model, choice, folder, resolved, compute)
        except ModelLoadFailed as error:
            if choice.engine == TORCH.engine or choice.demand:
                raise
            cause = f"{choice.engine}: {error.message}"
        # gc.collect frees the model, whose objects refer to each other, before the weights are read again
        del model
        gc.collect()
        return self._on_torch(family, folder, resolved, compute, cause)

    def _on_torch(self, family: Any, folder: Path, resolved: Resolved, compute: Compute, cause: str) -> Any:
        """Load the model on torch, because another engine cannot run it. `cause`: the other engine and the reason."""
        _logger.warning("%s runs on torch, not on %s", resolved.residency, cause)
        model = family(folder, resolved.entry, replace(resolved.load, engine=TORCH.engine), compute)
        return self._with_certificate(model, Choice(TORCH.engine, f"not {cause}"), folder, resolved, compute)

    def _with_certificate(self, model: Any, choice: Choice, folder: Path, resolved: Resolved, compute: Compute) -> Any:
        model.engine_choice = choice
        model.certificate = self._certified(model, folder, resolved, compute)
        return model

    def _check_weights(self, folder: Path, entry: ModelEntry, files: DerivedFiles) -> None:
        """Check the weight files of `folder`. Skip files that have not changed since an earlier check, also of another
        process, and all files of a family that another package defines.
        """
        if entry.family not in families.rows() or files.key in self._checked:
            return
        if files.read(_WEIGHTS) is None:
            check_weights(folder)
            files.keep(_WEIGHTS, b"checked")
        if len(self._checked) >= MAX_CERTIFICATES:
            self._checked.clear()
        self._checked.add(files.key)

    def _note_precision(self, model: Any, resolved: Resolved, compute: Compute) -> None:
        """Store the requested precision with the model. Warn once if the entry sets a precision and the model computes
        in another precision.
        """
        reason = compute.precision_reason
        if model.precision != compute.precision:
            reason = f"the family {resolved.entry.family} computes in {model.precision}"
        model.requested_precision, model.precision_reason = compute.requested, reason
        notice = (resolved.residency, reason)
        if reason and resolved.load.precision and notice not in self._reported:
            self._reported.add(notice)
            _logger.warning(
                "%s requests the precision %s and is served in %s: %s",
                resolved.residency,
                compute.requested,
                model.precision,
                reason,
            )

    def _certified(self, model: Any, folder: Path, resolved: Resolved, compute: Compute) -> dict[str, Any]:
        """Return the results of a model's checks, from an earlier load with the same key, engine and attention if there
        was one: in this process, or on the disk.
        """
        ran_on = (model.engine_choice.engine, model.attention.replace(" ", "-"))
        facts, name = (compute.derived.key, *ran_on), "-".join(["certificate", *ran_on])
        result = self.certificates.get(facts) or certificate.decoded(compute.derived.read(name))
        if result is None:
            result = certificate.certify(model, folder, resolved, compute)
            compute.derived.keep(name, msgspec.json.encode(result))
        elif hasattr(model, "backbone"):
            model.backbone.take_trial()
        if len(self.certificates) >= MAX_CERTIFICATES:
            self.certificates.clear()
        self.certificates[facts] = result
        return msgspec.to_builtins(result)  # type: ignore[no-any-return]
