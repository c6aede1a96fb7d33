"""`sie models import`: add a folder of model files to the catalogue. The files have the format of this project or of
the open-source SIE project.

    file ──► config service ──► stored: print the fields that were ignored
                            └ rejected: print the wrong fields, and continue with the next file
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from sie_cli.cluster import Cluster
from sie_cli.display import printable
from sie_cli.models.catalogue import document, print_body
from sie_cli.models.service import ConfigServiceClient, Rejected, WriteOptions, service_options
from sie_cli.refusal import CommandRefused
from sie_contracts.api.configs import Written
from sie_contracts.errors import ValidationFailed

_SUFFIXES = (".yaml", ".yml")


@click.command("import")
@click.argument("source", metavar="FOLDER", type=click.Path(exists=True, path_type=Path))
@click.option("--dry-run", is_flag=True, help="Do all checks, but store nothing.")
@click.option("--force", is_flag=True, help="Replace existing models, even if this makes an alias invalid.")
@service_options
def import_command(cluster: Cluster, source: Path, *, dry_run: bool, force: bool, output: str | None) -> None:
    """Add a folder of model files, or one file, to the catalogue of a config service.

    Files of the public SIE (sie_id, hf_id, profiles with adapter_path) are translated. Fields without a counterpart
    are printed. If a file is rejected, its reason is printed, the other files are stored, and the status is 1.
    """
    files = sorted(file for file in source.rglob("*") if file.suffix in _SUFFIXES) if source.is_dir() else [source]
    if not files:
        raise click.UsageError(f"{source} has no file that ends in {' or '.join(_SUFFIXES)}")
    write = WriteOptions(cluster, dry_run=dry_run, output=output, force=force)
    rows: list[dict[str, Any]] = []
    try:
        with write.service() as service:
            rows.extend(_imported(write, service, file) for file in files)
    finally:  # print the stored files also after Ctrl-C or an error
        if rows:
            print_body(rows, output, lambda: _show(rows, dry_run=dry_run))
    if rejected := sum("rejected" in row for row in rows):
        raise CommandRefused(
            f"{rejected} of {len(rows)} files are rejected: correct the fields above and import these files again"
        )


def _imported(write: WriteOptions, service: ConfigServiceClient, file: Path) -> dict[str, Any]:
    from sie_config_service.documents import read

    # File names may have bytes that are not UTF-8. The JSON output must be UTF-8.
    row: dict[str, Any] = {"file": os.fsencode(file).decode("utf-8", "replace")}
    body, content_type = document(file)
    try:
        value = read(body, content_type).value
        model = str(value.get("sie_id") or value.get("id")) if isinstance(value, dict) else ""
        answer = service.add(model, body, content_type, write=write)
    except (Rejected, ValidationFailed) as error:
        return {**row, "rejected": error.message}
    reply: Written = answer.body
    state = "unchanged" if reply.unchanged else "added" if reply.created_profiles else "replaced"
    return {**row, "model_id": reply.model_id, "state": state, "warnings": reply.warnings}


def _show(rows: list[dict[str, Any]], *, dry_run: bool) -> None:
    for row in rows:
        if "rejected" in row:
            click.echo(f"{printable(row['file'])}: rejected\n    " + row["rejected"].replace("\n", "\n    "))
            continue
        click.echo(f"{printable(row['model_id'])}: {row['state']}")
        for warning in row["warnings"]:
            click.echo(f"    {printable(warning)}")
    states = [row.get("state", "rejected") for row in rows]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    click.echo(f"dry run, nothing is stored: {counts}" if dry_run else counts)
