"""The TypeScript client has the types and the version of this commit."""

from __future__ import annotations

import json

import pages
import typescript_types

import sie_client


@pages.WHOLE
def test_the_types_are_those_of_the_openapi_document() -> None:
    assert f"sha256 of its schemas: {typescript_types.digest()}\n" in typescript_types.TYPES.read_text("utf-8")


def test_the_version_is_that_of_the_python_packages() -> None:
    package = json.loads((typescript_types.CLIENT / "package.json").read_text("utf-8"))
    assert package["version"] == sie_client.__version__
    assert f'VERSION = "{sie_client.__version__}"' in (typescript_types.CLIENT / "src" / "version.ts").read_text(
        "utf-8"
    )
