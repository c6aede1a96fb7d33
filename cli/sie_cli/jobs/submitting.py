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
from sie_cli.refusal import CommandRefused

if TYPE_CHECKING:
    from sie_client.types import JobOptions


@dataclass(frozen=True)
class OutputPlace:
    """Where the output goes: an address, or a folder of this machine that is filled once the job has ended. Neither: it
    is kept with the job. `is_made`: the folder was not there before.
    """

    url: str = ""
    folder: Path | None = None
    is_made: bool = False

    @classmethod
    def from_option(cls, text: str | None, *, is_new: bool = True) -> OutputPlace:
        """Raises CommandRefused for a folder that cannot be made, or where it `is_new` has the files of a job."""
        if text is None:
            return cls()
        if "://" in text:
            return cls(url=text)
        folder = Path(text).expanduser()
        if is_new and (folder / "manifest.json").exists():
            raise CommandRefused(f"{folder} has the files of another job: name another folder")
        is_made = not folder.exists()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CommandRefused(f"{folder}: {error.strerror}") from error
        return cls(folder=folder, is_made=is_made)

    def unmade(self) -> None:
        """Remove a folder that was made for a job which there is not. One that has files stays."""
        if self.folder is not None and self.is_made:
            with contextlib.suppress(OSError):
                self.folder.rmdir()


def params(pairs: Iterable[str]) -> dict[str, Any]:
    """Of `KEY=JSON`; what is no JSON is text. Raises BadParameter."""
    values: dict[str, Any] = {}
    for pair in pairs:
        name, mark, value = pair.partition("=")
        if not (name.strip() and mark):
            raise click.BadParameter(f"{pair[:80]}: expected KEY=VALUE, such as dimensions=256", param_hint="--param")
        try:
            values[name.strip()] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            values[name.strip()] = value
    return values


def metadata(pairs: Iterable[str]) -> dict[str, str]:
    """Of `KEY=TEXT`. Raises BadParameter."""
    texts = dict[str, str]()
    for pair in pairs:
        name, mark, value = pair.partition("=")
        if not (name and mark):
            raise click.BadParameter(f"{pair[:80]}: expected KEY=TEXT", param_hint="--metadata")
        texts[name] = value
    return texts


def options(values: dict[str, Any], place: OutputPlace) -> JobOptions:
    """What was given, in the client's words; the rest is left to the server. Raises BadParameter."""
    if values["operation"] is None and (values["query"] or values["document"]):
        values["operation"] = "score"
    output = {"url": place.url, **{name: values.pop(name) for name in ("format", "sink", "collection")}}
    output = {name: value for name, value in output.items() if value}
    keep = [name.strip() for names in values.pop("keep") for name in names.split(",") if name.strip()]
    job_options: dict[str, Any] = {
        **values,
        "output": output or None,
        "keep": keep or None,
        "params": params(values["params"]) or None,
        "metadata": metadata(values["metadata"]) or None,
        "deadline": future(values["deadline"]) if values["deadline"] else None,
        "windows": list(values["windows"]) or None,
    }
    for name in ("text", "query", "document"):  # a shell has no easy way to write a line break
        job_options[name] = job_options[name].replace("\\n", "\n") if job_options[name] else None
    return {name: value for name, value in job_options.items() if value not in (None, False, "")}  # type: ignore[return-value]
