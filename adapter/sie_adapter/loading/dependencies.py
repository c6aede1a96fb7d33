"""Check that the packages that a worker's bundle requires are installed, before any of them is imported."""

from __future__ import annotations

import logging
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from yaml import YAMLError

from sie_contracts.errors import ValidationFailed
from sie_contracts.models.bundles import BundleEntry
from sie_contracts.models.catalogue import packaged_folder
from sie_contracts.settings import SettingError, Settings
from sie_runtime.feed import read_bundles

_logger = logging.getLogger("sie.adapter")


def check(settings: Settings) -> None:
    """Check the installed packages against the requirements of SIE_BUNDLE. Raises SettingError that names each
    distribution that is missing or has another version, and each faulty requirement.

    A file in the package, or in `bundles/` of a local models folder, describes a bundle. If no file describes the
    bundle, nothing is checked. Raises SettingError if the files in the models folder cannot be read.
    """
    bundle = _described(settings)
    if bundle is None:
        _logger.warning("no file describes bundle %s, so its required packages are not checked", settings.bundle)
        return
    if faults := lacking(bundle):
        fix = "install these packages where this adapter is installed, or set the bundle for which this image was built"
        raise SettingError("SIE_BUNDLE", f"bundle {bundle.id} needs {'; '.join(faults)}: {fix}")


def lacking(bundle: BundleEntry) -> list[str]:
    faults = []
    for text in bundle.requires:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            faults.append(f"{text!r}, which is no requirement")
            continue
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        try:
            installed = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            faults.append(f"{text}, which is not installed")
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            faults.append(f"{text}, installed is {installed}")
    return faults


def _described(settings: Settings) -> BundleEntry | None:
    own = Path(settings.models_dir or "./models").expanduser() / "bundles"
    bundles = dict(read_bundles(packaged_folder() / "bundles"))
    if own.is_dir():
        try:
            bundles |= read_bundles(own)
        except (ValidationFailed, YAMLError, OSError) as error:
            raise SettingError("SIE_MODELS_DIR", f"{own}: {error}") from error
    return bundles.get(settings.bundle)
