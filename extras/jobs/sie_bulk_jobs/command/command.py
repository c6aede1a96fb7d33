"""Commands of `sie jobs`."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sie_bulk_jobs.command.job import (
    OutputPlace,
    check_columns,
    exit_status,
    failures_table,
    fetch_output,
    follow,
    hint_at_failures,
    job_facts,
    jobs_table,
    rows_text,
    submit_options,
    transfer_bar,
)
from sie_cli import display
from sie_cli.cluster import GATEWAY_URL, Cluster, cluster_options
from sie_cli.display import printable
from sie_cli.gateway_client import gateway_client
from sie_cli.options import AnyPosition

if TYPE_CHECKING:
    from sie_client import Job

SCOPE = "the scope infer"
FAILED_ROWS = 20
STATES = ("queued", "planning", "running", "paused", "finalizing", "completed", "failed", "cancelled", "expired")
_options = cluster_options(GATEWAY_URL)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
_job = click.argument("name", metavar="JOB")


@click.group(cls=AnyPosition, short_help="Work on whole files.")
def jobs() -> None:
    """Run a model on whole files: each row is one input, and the answers are written to files. Requests of clients have
    priority over jobs. A job continues after the end of any process, also of this command.

    \b
    sie jobs submit MODEL docs.jsonl --text "{title}" --output vectors    send a file, get files of vectors
    sie jobs submit MODEL s3://bucket/docs/ --output s3://bucket/out/     read from a bucket, write to a bucket
    sie jobs list                                                         your jobs, the newest first
    sie jobs watch JOB                                                    its progress, and the forecast of its end
    sie jobs show JOB --failed                                            all its fields, and the rows that failed
    sie jobs pause JOB, resume JOB, cancel JOB                            stop it for a while, continue it, end it
    sie jobs retry JOB                                                    run the failed rows in a new job
    sie jobs result JOB FOLDER                                            fetch its files, or the missing ones
    sie jobs delete JOB                                                   delete it and its files

    If the gateway requires a token: set SIE_API_KEY to a token with the scope infer. A token sees only its own
    jobs; an administrator's token sees all jobs.
    """


@jobs.command()
@click.argument("model")
@click.argument("source", metavar="INPUT")
@click.option(
    "--text", metavar="TEMPLATE", help='Text of each row to encode or extract from, such as "{title}\\n{body}".'
)
@click.option("--query", metavar="TEMPLATE", help="Query of each row. The model scores --document for this query.")
@click.option("--document", metavar="TEMPLATE", help="Document of each row, which the model scores for --query.")
@click.option("--image", metavar="COLUMN", help="Column of the image files.")
@click.option("--id", metavar="COLUMN", help="Column of the rows' ids.  [default: the file and the number of the row]")
@click.option("--keep", metavar="A,B", multiple=True, help="Columns of the input that are copied into the output.")
@click.option(
    "--chunks",
    metavar="KEY=N,..|COLUMN",
    help="Encode each text in chunks: max_tokens=256,overlap_tokens=32, or the column that has the text's chunks.",
)
@click.option("--no-context", is_flag=True, help="Encode each chunk alone, without the rest of its text as context.")
@click.option(
    "--documents",
    metavar="COLUMN",
    help="Column of document files, such as PDF, which are parsed and encoded in --chunks.",
)
@click.option("--parser", metavar="MODEL", help="Model that parses --documents.  [default: docling]")
@click.option(
    "--input-format",
    type=click.Choice(["jsonl", "csv", "parquet", "images"]),
    help="Format of the input.  [default: by the ending of its name]",
)
@click.option(
    "--output",
    "-o",
    metavar="URL|FOLDER",
    help="Where the output files go: a URL that the server may write to, or a folder of this machine.",
)
@click.option(
    "--format", type=click.Choice(["parquet", "jsonl", "npy"]), help="Format of the output files.  [default: parquet]"
)
@click.option(
    "--sink",
    metavar="NAME",
    help="Name of a vector database of the server, which gets the vectors in addition to the files.",
)
@click.option("--collection", metavar="NAME", help="Collection or table of --sink that gets the vectors.")
@click.option(
    "--operation",
    type=click.Choice(["encode", "score", "extract"]),
    help="What the model does with each row.  [default: score with --query or --document, else encode]",
)
@click.option(
    "--param",
    "params",
    metavar="KEY=JSON",
    multiple=True,
    help="Parameter of the requests: dimensions=256, output_dtype=int8. May be repeated.",
)
@click.option(
    "--cache",
    is_flag=True,
    help="Store the answers for later jobs, and use those that earlier jobs with --cache stored.",
)
@click.option("--deadline", metavar="TIME", help="Time at which the job should be done: 12h, 2030-01-31T06:00+01:00.")
@click.option("--expires", is_flag=True, help="End the job at --deadline. Rows that have not run by then are not run.")
@click.option(
    "--window",
    "windows",
    metavar="HH:MM-HH:MM",
    multiple=True,
    help="Time of day in which the job may run: 22:00-06:00. May be repeated.",
)
@click.option("--time-zone", metavar="ZONE", help="Time zone of --window, such as Europe/Berlin.  [default: UTC]")
@click.option(
    "--tokens-per-s", type=click.FloatRange(0, min_open=True), help="Highest rate of the job, in tokens per second."
)
@click.option("--machine-profile", metavar="NAME", help="Run the job only on workers with this machine profile.")
@click.option("--pool", metavar="NAME", help="Run the job only on workers of this pool.")
@click.option(
    "--shard-rows",
    type=click.IntRange(1),
    help="Maximum number of rows in a part of the input. Each part has its own output file.",
)
@click.option("--name", metavar="TEXT", help="Name of the job, which lists of jobs show.")
@click.option(
    "--metadata", metavar="KEY=TEXT", multiple=True, help="Text that is stored with the job. May be repeated."
)
@click.option("--wait", is_flag=True, help="Wait until the job has ended. The default if --output is a folder.")
@_json
@_options
def submit(
    cluster: Cluster, model: str, source: str, output: str | None, wait: bool, as_json: bool, **values: Any
) -> None:
    """Start a job that runs MODEL on every row of INPUT. Prints the id of the job.

    INPUT is a file of this machine (which is sent first), the id of a file that was sent before, or an address that the
    server allows: one object, or all objects below a path that ends in /. Formats: JSON Lines, CSV, Parquet and
    images.

    \b
    sie jobs submit sentence-transformers/all-MiniLM-L6-v2 docs.jsonl --text "{title}\\n{body}" --id id -o vectors
    sie jobs submit BAAI/bge-reranker-v2-m3 pairs.csv --query "{question}" --document "{answer}" --format jsonl
    sie jobs submit gliner-community/gliner_medium-v2.5 s3://docs/2030/ --operation extract --text "{body}" \\
        --param labels='["person", "place"]' -o s3://docs/found/ --window 22:00-06:00
    JOB=$(sie jobs submit MODEL docs.parquet --text "{body}"); sie jobs watch $JOB

    A template names columns in braces, as in "{title}\\n{body}"; \\n is a line break.

    Status 0: submitted; with --wait: completed, and every row has an answer. 3: completed, but some rows failed. 1: the
    job was refused, failed, expired, was cancelled, or is paused by an error. 2: no gateway answered, or an option is
    wrong. 130: Ctrl-C; the job continues.
    """
    place = OutputPlace.from_option(output)
    job_options = submit_options(values, place)
    with gateway_client(cluster, SCOPE, is_patient=True) as client:
        try:
            if Path(source).is_file():
                check_columns(Path(source), job_options)
            with display.transfers() as bars:
                job_options["on_upload"] = transfer_bar(bars, Path(source).name)
                job = client.jobs.submit(model, source, **job_options)
        except BaseException:
            place.unmade()
            raise
        if not as_json:
            click.echo(printable(job.id))
        if wait or place.folder is not None:
            follow(job, err=True)
            hint_at_failures(job.info)
        if place.folder is not None and job.state == "completed":
            fetch_output(job, place.folder)
        elif job.has_ended:
            place.unmade()
    if as_json:
        click.echo(display.document(job.info))
    if wait or place.folder is not None:
        sys.exit(exit_status(job.info))


@jobs.command("list")
@click.option("--state", type=click.Choice(STATES), help="List only jobs in this state.")
@click.option("--limit", default=20, show_default=True, type=click.IntRange(1), help="Maximum number of jobs to list.")
@_json
@_options
def list_command(cluster: Cluster, state: str | None, limit: int, as_json: bool) -> None:
    """List the jobs, newest first."""
    with gateway_client(cluster, SCOPE) as client:
        infos = [job.info for job in itertools.islice(client.jobs.list(state, min(limit + 1, 100)), limit + 1)]
    has_more, infos = len(infos) > limit, infos[:limit]
    if as_json:
        click.echo(display.document(infos))
    elif not infos:
        click.echo("no jobs" if state is None else f"no jobs are {state}")
    else:
        display.table(jobs_table(infos))
    if has_more and not as_json:
        click.echo(f"these are the newest {limit}; --limit shows more", err=True)


@jobs.command()
@_job
@click.option("--failed", is_flag=True, help=f"Also show rows that failed, and why; {FAILED_ROWS} at most.")
@_json
@_options
def show(cluster: Cluster, name: str, failed: bool, as_json: bool) -> None:
    """Show all fields of a job."""
    with gateway_client(cluster, SCOPE) as client:
        job = client.jobs.get(name)
        rows = job.rows(FAILED_ROWS, failed=True) if failed else []
    if as_json:
        click.echo(display.document({"job": job.info, "failed": rows} if failed else job.info))
        return
    facts = job_facts(job.info, time.time())
    width = max(map(len, facts)) + 2
    for field, value in facts.items():
        click.echo(f"{field + ':':<{width}}{value}")
    if failed:
        click.echo()
        if rows:
            display.table(failures_table(rows))
        else:
            click.echo("no row has an error")


@jobs.command()
@_job
@_json
@_options
def watch(cluster: Cluster, name: str, as_json: bool) -> None:
    """Follow a job until it ends or is paused by an error. Shows rows, rate, forecast of the end, errors by code, and
    the cause of a wait.

    A terminal shows one picture that changes; a pipe gets a line for each change, or a JSON object with --json. While
    the gateway restarts, the command waits. Ctrl-C ends this command, but not the job.

    Status 0: completed, and every row has an answer. 3: completed, but some rows failed. 1: failed, expired,
    cancelled, paused by an error, or there is no such job. 2: no gateway answered. 130: Ctrl-C.
    """
    with gateway_client(cluster, SCOPE, is_patient=True) as client:
        job = client.jobs.get(name)
        follow(job, err=False, as_json=as_json)
        hint_at_failures(job.info)
    sys.exit(exit_status(job.info))


@jobs.command()
@_job
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@_options
def result(cluster: Cluster, name: str, folder: Path) -> None:
    """Fetch the files of a job into FOLDER. The last file is manifest.json.

    Each file is checked by its digest, and appears when it is complete. Repeat the command to fetch missing files.

    Status 0: all files were fetched, and every row has an answer. 3: all files were fetched, but some rows failed. 1:
    the job has not ended or is not completed; the files so far were fetched. 2: no gateway answered.
    """
    with gateway_client(cluster, SCOPE, is_patient=True) as client:
        job = client.jobs.get(name)
        fetch_output(job, folder)
    if job.state != "completed":
        click.echo(printable(f"{job.id} is {job.state}: these are its files so far"), err=True)
    sys.exit(exit_status(job.info))


def _changed(cluster: Cluster, name: str, change: Callable[[Job], Job], as_json: bool, goal: str = "") -> None:
    """Change a job and print its state. `goal`: the state of the job after its running parts (shards) have stopped."""
    with gateway_client(cluster, SCOPE) as client:
        job = change(client.jobs.get(name))
    is_under_way = goal and job.state in ("queued", "planning", "running", "finalizing")
    then = f", and will be {goal} when the parts under way have stopped" if is_under_way else ""
    click.echo(display.document(job.info) if as_json else printable(f"{job.id} is {job.state}{then}"))


@jobs.command()
@_job
@_json
@_options
def pause(cluster: Cluster, name: str, as_json: bool) -> None:
    """Stop a job until `sie jobs resume`. Parts of the input that are running are stopped, and later run again from
    their start. Completed parts keep their output.
    """
    _changed(cluster, name, lambda job: job.pause(), as_json, "paused")


@jobs.command()
@_job
@_json
@_options
def resume(cluster: Cluster, name: str, as_json: bool) -> None:
    """Continue a job that was paused."""
    _changed(cluster, name, lambda job: job.resume(), as_json)


@jobs.command()
@_job
@_json
@_options
def cancel(cluster: Cluster, name: str, as_json: bool) -> None:
    """End a job. The files that it has written stay until the job is deleted."""
    _changed(cluster, name, lambda job: job.cancel(), as_json, "cancelled")


@jobs.command()
@_job
@_json
@_options
def retry(cluster: Cluster, name: str, as_json: bool) -> None:
    """Start a new job for the failed rows of a job. Prints the id of the new job."""
    with gateway_client(cluster, SCOPE) as client:
        job = client.jobs.get(name).retry()
    click.echo(display.document(job.info) if as_json else printable(job.id))


@jobs.command()
@_job
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@_options
def delete(cluster: Cluster, name: str, yes: bool) -> None:
    """Delete a job that has ended, and its stored files. This cannot be undone."""
    with gateway_client(cluster, SCOPE) as client:
        job = client.jobs.get(name)
        if not yes:
            click.confirm(printable(f"Delete {job.id} ({job.state}, {rows_text(job.info)}) and its files?"), abort=True)
        job.delete()
    click.echo(printable(f"{job.id} is deleted"))
