"""What `sie jobs submit` sends: options become those of the client."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from sie_cli.moments import future
from sie_cli.refusal import Refused

if TYPE_CHECKING:
    from sie_client.types import JobOptions


@dataclass(frozen=True)
class Place:
    """Where the output goes: an address, or a folder of this machine that is filled once the job has ended. Neither: it
    is kept with the job. `is_made`: the folder was not there before.
    """

    url: str = ""
    folder: Path | None = None
    is_made: bool = False

    @classmethod
    def of(cls, given: str | None, *, is_new: bool = True) -> Place:
        """Raises Refused for a folder that cannot be made, or where it `is_new` has the files of a job."""
        if given is None:
            return cls()
        if "://" in given:
            return cls(url=given)
        folder = Path(given).expanduser()
        if is_new and (folder / "manifest.json").exists():
            raise Refused(f"{folder} has the files of another job: name another folder")
        is_made = not folder.exists()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Refused(f"{folder}: {error.strerror}") from error
        return cls(folder=folder, is_made=is_made)

    def unmade(self) -> None:
        """Remove a folder that was made for a job which there is not. One that has files stays."""
        if self.folder is not None and self.is_made:
            with contextlib.suppress(OSError):
                self.folder.rmdir()


def params(given: Iterable[str]) -> dict[str, Any]:
    """Of `KEY=JSON`; what is no JSON is text. Raises BadParameter."""
    found: dict[str, Any] = {}
    for each in given:
        name, mark, value = each.partition("=")
        if not (name.strip() and mark):
            raise click.BadParameter(f"{each[:80]}: expected KEY=VALUE, such as dimensions=256", param_hint="--param")
        try:
            found[name.strip()] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            found[name.strip()] = value
    return found


def metadata(given: Iterable[str]) -> dict[str, str]:
    """Of `KEY=TEXT`. Raises BadParameter."""
    found = dict[str, str]()
    for each in given:
        name, mark, value = each.partition("=")
        if not (name and mark):
            raise click.BadParameter(f"{each[:80]}: expected KEY=TEXT", param_hint="--metadata")
        found[name] = value
    return found


def options(given: dict[str, Any], place: Place) -> JobOptions:
    """What was given, in the client's words; the rest is left to the server. Raises BadParameter."""
    if given["operation"] is None and (given["query"] or given["document"]):
        given["operation"] = "score"
    output = {"url": place.url, **{name: given.pop(name) for name in ("format", "sink", "collection")}}
    output = {name: value for name, value in output.items() if value}
    keep = [name.strip() for each in given.pop("keep") for name in each.split(",") if name.strip()]
    found: dict[str, Any] = {
        **given,
        "output": output or None,
        "keep": keep or None,
        "params": params(given["params"]) or None,
        "metadata": metadata(given["metadata"]) or None,
        "deadline": future(given["deadline"]) if given["deadline"] else None,
        "windows": list(given["windows"]) or None,
    }
    for name in ("text", "query", "document"):  # a shell has no easy way to write a line break
        found[name] = found[name].replace("\\n", "\n") if found[name] else None
    return {name: value for name, value in found.items() if value not in (None, False, "")}  # type: ignore[return-value]
