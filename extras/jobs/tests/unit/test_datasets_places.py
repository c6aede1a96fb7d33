"""SIE_JOBS_URLS: the places that clients may name for inputs and outputs."""

from __future__ import annotations

from pathlib import Path

import obstore
import pytest

from sie_bulk_jobs.datasets import plans, rows
from sie_bulk_jobs.datasets.places import Place
from sie_bulk_jobs.records import RowSpan
from sie_contracts.api.jobs import JobInput
from sie_contracts.errors import InvalidInput


@pytest.fixture(autouse=True)
def _region(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "us-east-1")


ALLOWED = ("s3://bucket/a/b", "gs://other", "/srv/jobs")


@pytest.mark.parametrize(
    ("url", "folder", "name"),
    [
        ("s3://bucket/a/b", "", ""),
        ("s3://bucket/a/b/", "", ""),
        ("s3://bucket/a/b/c.csv", "", "c.csv"),
        ("s3://bucket/a/b/c/", "c/", ""),
        ("s3://bucket/a/b/c/d%20e.csv", "c/", "d e.csv"),
        ("gs://other/x/y.jsonl", "x/", "y.jsonl"),
    ],
)
def test_what_is_below_an_allowed_url_is_opened(url: str, folder: str, name: str) -> None:
    place = Place.opened(url, ALLOWED)
    assert (place.folder, place.name) == (folder, name)


def test_a_place_on_the_disk_is_opened_by_its_path_and_by_its_url(tmp_path: Path) -> None:
    for allowed in (str(tmp_path), f"file://{tmp_path}", f"{tmp_path}/"):
        for url in (f"{tmp_path}/in/rows.csv", f"file://{tmp_path}/in/rows.csv"):
            place = Place.opened(url, (allowed,))
            assert (place.folder, place.name) == ("in/", "rows.csv")
        output = Place.opened(f"{tmp_path}/out", (allowed,), is_output=True)
        assert (output.folder, output.name) == ("out/", "")


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/a/bc",
        "s3://bucket/a",
        "s3://bucket",
        "s3://bucket2/a/b",
        "gs://bucket/a/b",
        "s3://bucket/a/b/../c",
        "s3://bucket/a/b/%2e%2e/c",
        "s3://bucket/a/b/./c",
        "s3://bucket/a/b//c",
        "s3://bucket/a/b/..",
        "s3://bucket/a/b/c%00d",
        "s3://bucket/a/b/c%5c..",
        "/srv/jobs/../other",
        "file:///srv/jobs/../other",
        "file:///srv/jobs/%2e%2e/other",
        "/srv/jobs2/x",
        "file:///etc/passwd",
        "../jobs/x",
        "file://host/srv/jobs/x",
        "http://bucket/a/b",
        "s3://user@bucket/a/b",
        "s3://bucket/a/b?x=1",
        "",
    ],
)
@pytest.mark.parametrize("is_output", [False, True])
def test_anything_else_is_refused(url: str, is_output: bool) -> None:
    with pytest.raises(InvalidInput) as caught:
        Place.opened(url, ALLOWED, is_output=is_output)
    assert caught.value.param == ("output.url" if is_output else "input.url")


async def test_a_symbolic_link_leads_nowhere_else(tmp_path: Path) -> None:
    """A link to a file or a folder outside of the place is not planned, read, or written through. A link within the
    place is followed.
    """
    inside, outside = tmp_path / "in", tmp_path / "secret"
    (inside / "real").mkdir(parents=True)
    outside.mkdir()
    (outside / "rows.jsonl").write_text('{"t": "secret"}\n')
    (inside / "real" / "rows.jsonl").write_text('{"t": "own"}\n')
    (inside / "a.jsonl").symlink_to(outside / "rows.jsonl")
    (inside / "folder").symlink_to(outside)
    (inside / "near.jsonl").symlink_to(inside / "real" / "rows.jsonl")
    place, source = Place.opened(f"{inside}/", (str(inside),)), JobInput(url="u", text="{t}")
    planned = [entry async for entry in plans.plan(place, source, 10)]
    broken = [entry for entry in planned if isinstance(entry, plans.Broken)]
    assert {fault.error.reason for fault in broken} == {"not_allowed"}
    spans = [span for entry in planned if isinstance(entry, list) for span in entry]
    assert [span.source for span in spans] == ["near.jsonl", "real/rows.jsonl"]
    assert [row.text for span in spans for row in await rows.read(place, span, source)] == ["own", "own"]
    for name in ("a.jsonl", "folder/rows.jsonl"):
        tag = obstore.head(place.store, name)["e_tag"] or ""
        with pytest.raises(InvalidInput, match="symbolic link"):
            await rows.read(place, RowSpan(name, "jsonl", 0, 1, 0, 16, tag=tag), source)
    output = Place.opened(f"{inside}/folder", (str(inside),), is_output=True)
    with pytest.raises(InvalidInput, match="symbolic link") as caught:
        await output.check(output.folder + "part-00000.parquet")
    assert caught.value.param == "output.url"
