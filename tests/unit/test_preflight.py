"""What `sie serve` finds out about its control group."""

from __future__ import annotations

from pathlib import Path

import pytest

from sie_cli import preflight
from sie_contracts.settings import load


@pytest.mark.parametrize(
    ("path", "files", "limits"),
    [
        # the one around binds as well
        (
            "/a/b",
            {"a/b/memory.max": "700", "a/memory.max": "500", "memory.max": "max"},
            [700, 500],
        ),
        ("/a", {"a/memory.max": "max"}, []),
        ("/docker/of-the-host", {"memory.max": "300"}, [300]),  # inside a container its own group is the root
        ("/", {"memory.max": "9223372036854771712"}, []),
    ],
)
def test_the_limits_of_a_group_and_those_around_it(
    tmp_path: Path, path: str, files: dict[str, str], limits: list[int]
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{content}\n")
    assert list(preflight._limits(tmp_path, path, "memory.max")) == limits


def test_a_folder_of_models_that_is_not_there_is_told_before_anything_starts(tmp_path: Path) -> None:
    def needs(folder: str) -> preflight.Needs:
        settings = load(environ={"SIE_MODELS_DIR": folder}).settings
        return preflight.Needs((), tmp_path, has_broker=False, gateways=1, workers=1, settings=settings)

    (fault,) = preflight._folders(needs(str(tmp_path / "nope")))
    assert fault.startswith("--models-dir (SIE_MODELS_DIR): ")
    assert "is not a folder: make it, or name another one" in fault
    assert list(preflight._folders(needs(str(tmp_path)))) == []
    assert list(preflight._folders(needs("s3://bucket/models"))) == []
