"""The bill of materials of an air-gap archive: the standard's own schema, licences, and the software that it names."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from packageurl import PackageURL

from sie_cli.airgap import sbom
from sie_contracts.models.entries import parse_entry
from sie_store.weights.manifest import FileFact

ENTRIES = [
    {
        "id": "org/model",
        "weights": {"hub": "org/model", "revision": "AB" * 20},
        "license": "apache-2.0",
        "description": "A model.",
    },
    {"id": "org/gemma", "weights": {"hub": "org/gemma", "revision": "c" * 40}, "license": "gemma"},
    {"id": "mine", "weights": {"path": "/weights/mine"}},
    {"id": "both", "weights": {"package": "Tiny"}, "license": "MIT OR apache-2.0"},
]


def bill(packages: dict[str, sbom.Package]) -> bytes:
    entries = [
        parse_entry({"family": "text-encoder", "outputs": {"dense": 8}, "max_tokens": 16, **entry}) for entry in ENTRIES
    ]
    files = {"weights/org_2fmodel/model.safetensors": FileFact(3, "0" * 64)}
    return sbom.bill([(entry, files if entry.id == "org/model" else {}) for entry in entries], packages, "0.1.0")


@pytest.fixture(scope="module")
def packages() -> dict[str, sbom.Package]:
    return sbom.software(sbom.SOFTWARE)


@pytest.fixture(scope="module")
def document(packages: dict[str, sbom.Package]) -> dict[str, Any]:
    return json.loads(bill(packages))


def test_it_is_what_the_standard_says(document: dict[str, Any]) -> None:
    """Oracle: the schemas of CycloneDX 1.6, as its own Python library carries them."""
    folder = importlib.resources.files("cyclonedx") / "schema" / "_res"
    names = {"bom-1.6": "", "spdx": "spdx.schema.json", "jsf-0.82": "jsf-0.82.schema.json"}
    schemas = {name: json.loads((folder / f"{name}.SNAPSHOT.schema.json").read_text()) for name in names}
    registry = jsonschema_rs.Registry(
        [
            (f"http://cyclonedx.org/schema/{name}", schemas[key])
            for key, short in names.items()
            if short
            for name in (short, f"{key}.SNAPSHOT.schema.json")
        ]
    )
    validator = jsonschema_rs.validator_for(schemas["bom-1.6"], registry=registry, validate_formats=True)
    assert [f"{error.instance_path}: {error.message[:300]}" for error in validator.iter_errors(document)] == []
    library = {"type": "library", "name": "x"}
    for broken in ({"type": "model", "name": "x"}, {**library, "licenses": [{"license": {"id": "Apache 2"}}]}):
        assert not validator.is_valid({**document, "components": [broken]}), broken


def test_every_reference_is_there_once(document: dict[str, Any]) -> None:
    def refs(components: list[dict[str, Any]]) -> list[str]:
        return [
            ref for component in components for ref in (component["bom-ref"], *refs(component.get("components", [])))
        ]

    references = [document["metadata"]["component"]["bom-ref"], *refs(document["components"])]
    assert len(references) == len(set(references))
    assert {
        ref for dependency in document["dependencies"] for ref in (dependency["ref"], *dependency["dependsOn"])
    } <= set(references)
    assert {"model:mine", "model:org/model"} <= set(document["dependencies"][0]["dependsOn"])


def test_licences_are_ids_of_the_spdx_list_where_it_has_them(document: dict[str, Any]) -> None:
    licences = {component["name"]: component.get("licenses") for component in document["components"]}
    assert licences["org/model"] == [{"license": {"id": "Apache-2.0"}}]
    assert licences["org/gemma"] == [{"license": {"name": "gemma"}}]
    assert licences["both"] == [{"expression": "MIT OR Apache-2.0"}]
    assert licences["mine"] is None
    assert licences["msgspec"] == [{"license": {"id": "BSD-3-Clause"}}]


@pytest.mark.parametrize("field", ["a line\n  of a whole text", "UNKNOWN", "x" * 2000, ""])
def test_a_licence_that_is_no_name_is_that_of_the_classifiers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, field: str
) -> None:
    folder = tmp_path / "toy-1.dist-info"
    folder.mkdir()
    classifier = "License :: OSI Approved :: MIT License"
    (folder / "METADATA").write_text(f"Name: toy\nVersion: 1\nLicense: {field}\nClassifier: {classifier}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert sbom.Package.installed("toy").licence == sbom.spdx("MIT License")


def test_package_urls_are_package_urls(document: dict[str, Any]) -> None:
    """Oracle: the package-url library."""
    purls = {component["name"]: component["purl"] for component in document["components"] if "purl" in component}
    assert PackageURL.from_string(purls["org/model"]) == PackageURL("huggingface", "org", "model", "ab" * 20)
    assert PackageURL.from_string(purls["torch"]) == PackageURL(
        "pypi", None, "torch", importlib.metadata.version("torch")
    )
    assert all(PackageURL.from_string(purl).to_string() == purl for purl in purls.values())


def test_the_software_is_what_serving_needs_and_nothing_of_the_tests(packages: dict[str, sbom.Package]) -> None:
    assert {"torch", "transformers", "fastapi", "msgspec", "nats-py", "sie-cluster", "click"} <= packages.keys()
    assert not {"pytest", "mypy", "hypothesis", "ruff", "cyclonedx-python-lib"} & packages.keys()
    assert {"starlette", "pydantic"} <= packages["fastapi"].needs
    assert packages["numpy"].version == importlib.metadata.version("numpy")


def test_it_is_the_same_for_the_same_contents(packages: dict[str, sbom.Package]) -> None:
    assert bill(packages) == bill(dict(packages))
    assert json.loads(bill({}))["serialNumber"] != json.loads(bill(packages))["serialNumber"]


def test_licence_texts_are_those_that_distributions_bring(packages: dict[str, sbom.Package]) -> None:
    page = packages["click"].licence_page().decode()
    assert page.startswith(f"######## click {importlib.metadata.version('click')}, licence: BSD-3-Clause ########\n")
    assert "Redistribution and use in source and binary forms" in page
    assert all(sbom.is_licence(name) for name in ("LICENSE", "LICENCE.txt", "COPYING", "NOTICE.md", "license-mit"))
    assert not any(sbom.is_licence(name) for name in ("licenses.py", "LICENSES/x", "model.safetensors", "docs/LICENSE"))
