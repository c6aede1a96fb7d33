"""What `sie serve` finds out about its control group."""

from __future__ import annotations

from pathlib import Path

import pytest

from sie_cli import preflight


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
