"""Trust in a catalogue entry: the code that it may make a worker run, and the paths that it may make a worker read. The
operator decides this, never the author of the entry.

    claims(entry)  code: load.trust_remote_code, weights.package, a family of another package
                   path: weights.path, golden and run.lora that name a path of the file system
    allowed        a claim that the operator's own entries make too (packaged, or in SIE_MODELS_DIR);
                   code, with SIE_ALLOW_REMOTE_CODE; paths below the models folder or a folder of SIE_MODEL_PATHS

The config service checks each entry that is written over HTTP. An adapter checks the entry again, by its own settings
and file system, before it loads the model: everybody with access to the broker can send an entry to the adapter.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from sie_contracts.models.bundles import BundleEntry
from sie_contracts.models.entries import ModelEntry

USUAL = "./models"
# A claim of a path with more files than this is refused, because a check of every file for a link out of the allowed
# folders would take too long.
MAX_FILES = 10_000


@dataclass(frozen=True)
class Claim:
    """A permission that an entry needs. `value`: the path, or a description of the code that would run. `loc`: the
    field of the entry; two claims that differ only in `loc` are equal.
    """

    kind: Literal["code", "path"]
    value: str
    loc: str = field(compare=False)


@dataclass(frozen=True)
class TrustRefusal:
    """Reason why an entry was refused. `message`: sentence for the entry's author, without paths of this machine."""

    reason: Literal["remote_code", "model_path"]
    loc: str
    message: str


def claims(entry: ModelEntry, families: Iterable[str]) -> list[Claim]:
    """List the permissions that an entry needs. `families`: families of the packaged bundles, whose code is trusted."""
    weights = entry.weights
    # all sources: a load takes the first source that exists on the worker, so each source may supply the code
    source = msgspec.json.encode([weights.path, weights.package, weights.hub, weights.revision]).decode()
    claimed = []
    loads = {"$.load": entry.load} | {
        f"$.profiles.{name}.load": profile.load for name, profile in entry.profiles.items()
    }
    runs_code = [loc for loc, load in loads.items() if load is not None and load.trust_remote_code]
    claimed += [Claim("code", f"code of {source}", f"{loc}.trust_remote_code") for loc in runs_code]
    if weights.package:
        claimed.append(Claim("code", f"package {weights.package}", "$.weights.package"))
    if entry.family not in families:
        claimed.append(Claim("code", f"family {entry.family} of {source}", "$.family"))
    if weights.path:
        claimed.append(Claim("path", weights.path, "$.weights.path"))
    if os.path.isabs(entry.golden) or ".." in Path(entry.golden).parts:
        claimed.append(Claim("path", entry.golden, "$.golden"))
    runs = {"$.run": entry.run} | {f"$.profiles.{name}.run": profile.run for name, profile in entry.profiles.items()}
    claimed += [Claim("path", run.lora, f"{loc}.lora") for loc, run in runs.items() if run.lora and is_place(run.lora)]
    return claimed


def is_place(lora: str) -> bool:
    return lora.startswith(("/", ".", "~"))


@dataclass(frozen=True)
class Allowed:
    """The operator's settings for trust: SIE_ALLOW_REMOTE_CODE, SIE_MODEL_PATHS, SIE_MODELS_DIR (None: ./models)."""

    code: bool = False
    paths: tuple[str, ...] | None = None
    models_dir: str | None = None

    @property
    def models(self) -> str:
        """Return the path of the models folder, or the URL of a bucket that is used in place of a folder."""
        return self.models_dir or USUAL

    @property
    def folders(self) -> list[str]:
        """Return the folders whose files an entry may use, with all symbolic links resolved."""
        named = [*(self.paths or ()), *(() if is_bucket(self.models) else (self.models,))]
        return [os.path.realpath(os.path.expanduser(folder)) for folder in named]


class Trust:
    """Checks the claims (`Claim`) of entries. A claim is allowed if the settings of this process allow it, or if one of
    the operator's own entries (`own`: the packaged entries and the entries of the models folder) has the same claim.
    """

    def __init__(
        self, allowed: Allowed, bundles: Iterable[BundleEntry], own: Callable[[], Iterable[ModelEntry]]
    ) -> None:
        """Create the check. `bundles`: the packaged bundles; the code of their families is trusted."""
        self._allowed = allowed
        self._families = frozenset(family for bundle in bundles for family in bundle.families)
        self._own = own

    def refused(self, entry: ModelEntry, *, is_here: bool) -> TrustRefusal | None:
        """Return why the entry is refused; None if it is allowed. `is_here`: the files of the entry are on this
        machine; then links to files outside of the allowed folders are refused too.
        """
        wanting = [claim for claim in claims(entry, self._families) if not self._is_allowed(claim, is_here=is_here)]
        if not wanting:
            return None
        own_claims = {claim for own in self._own() for claim in claims(own, self._families)}
        left = next((claim for claim in wanting if claim not in own_claims), None)
        return None if left is None else _refused(left)

    def _is_allowed(self, claim: Claim, *, is_here: bool) -> bool:
        if claim.kind == "code":
            return self._allowed.code
        return is_below(claim.value, self._allowed.folders, is_here=is_here)


def is_bucket(url: str) -> bool:
    return url.startswith(("s3://", "gs://"))


def is_below(path: str, folders: Iterable[str], *, is_here: bool) -> bool:
    """Return whether a path (with links resolved) is in one of the folders; False for a path with a NUL. With
    `is_here`, each file and folder below the path must be in one of the folders too, and there must be at most
    MAX_FILES files.
    """
    if "\0" in path:  # no file can have the character NUL in its path
        return False
    roots = [folder.rstrip("/") + "/" for folder in folders]

    def is_in(place: str) -> bool:
        return f"{os.path.realpath(place)}/".startswith(tuple(roots))

    place = os.path.expanduser(path)
    if not is_in(place):
        return False
    file_count = 0
    for parent, below, files in os.walk(place) if is_here else ():
        file_count += len(files)
        if file_count > MAX_FILES or not all(is_in(os.path.join(parent, name)) for name in (*below, *files)):
            return False
    return True


def _refused(claim: Claim) -> TrustRefusal:
    name = claim.loc.removeprefix("$.")
    as_file = "or write the entry as a file in SIE_MODELS_DIR"
    both = "at the config service and at workers"
    if claim.kind == "path":
        fault = (
            f"{name} names a path that is not below the models folder or a folder of SIE_MODEL_PATHS, or a path with "
            "links that lead out of these folders"
        )
        return TrustRefusal(
            "model_path",
            claim.loc,
            f"{fault}; add the folder to SIE_MODEL_PATHS {both}, {as_file} (`sie serve FOLDER` writes this file)",
        )
    fault = f"{name} makes a worker use code or files that the operator has not allowed for entries written over HTTP"
    return TrustRefusal("remote_code", claim.loc, f"{fault}; set SIE_ALLOW_REMOTE_CODE=true {both}, {as_file}")
