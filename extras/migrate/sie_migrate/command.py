"""Command `sie migrate`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from sie_bulk_jobs.command.job import OutputPlace
from sie_cli import display
from sie_cli.cluster import CONFIG_URL, GATEWAY_URL, Cluster, cluster_options
from sie_cli.gateway_client import gateway_client
from sie_cli.models.service import WriteOptions, service_of
from sie_cli.refusal import INTERRUPTED, refusing
from sie_migrate.compare import MAX_TEXTS

# with --corpus: value of --step -> last step that the migration runs; `check` includes the step "quality"
UNTIL = {"check": "quality", "embed": "embed", "shadow": "shadow", "flip": "flip"}
BACK, CLEAN_UP = "back", "clean-up"
SCOPE = "the scope infer"
SAMPLE, MIN_AGREEMENT, SHARE, SHADOW_S = 500, 0.8, 0.1, 60.0
_CORPUS_OPTIONS = ("--input-format", "--output", "--shadow-share", "--shadow-s", "--shadow-requests")
_STOPPED_LIVE = {"flip": "repeat the command to continue the flip, or add --step back to undo it"}
_STOPPED = {
    "shadow": "the shadow stays; repeat the command to continue, or remove it with `sie models alias {alias} MODEL`",
    "flip": "the alias names the old or the new model; repeat the command to see which, and to continue",
}


@click.command(short_help="Move an alias to another encoder.")
@click.argument("alias")
@click.argument("model", metavar="[NEW_MODEL]", required=False)
@click.option("--corpus", metavar="FILE|URL", help="Texts of the index: a file or URL that `sie jobs submit` can read.")
@click.option("--text", metavar="TEMPLATE", help='Text of each row, such as "{title}\\n{body}".')
@click.option(
    "--id",
    "id_column",
    metavar="COLUMN",
    help="Column of ids.  [default: file and number of the row; in PostgreSQL the primary key]",
)
@click.option(
    "--input-format",
    type=click.Choice(["jsonl", "csv", "parquet"]),
    help="Format of the corpus.  [default: from the ending of the file name]",
)
@click.option(
    "--output",
    "-o",
    metavar="URL|FOLDER",
    help="With --corpus: where the files with the new vectors go.  [default: kept with the job]",
)
@click.option(
    "--sink",
    metavar="NAME",
    help="Vector database (a name in SIE_JOBS_SINKS) of the index and its texts. With --corpus: for the new vectors.",
)
@click.option(
    "--collection",
    metavar="NAME",
    help="Table, or alias of Qdrant, that searches use. With --corpus: collection or table for the new vectors.",
)
@click.option(
    "--vector",
    metavar="NAME",
    help="Name of the index's vector.  [default: embedding in PostgreSQL, the only one in Qdrant]",
)
@click.option(
    "--sample",
    default=SAMPLE,
    show_default=True,
    type=click.IntRange(0, MAX_TEXTS),
    help="Number of texts with which the models are compared. 0: do not compare.",
)
@click.option(
    "--min-agreement",
    default=MIN_AGREEMENT,
    show_default=True,
    type=click.FloatRange(0, 1),
    help="Lowest accepted share of the 10 nearest neighbours that both models find.",
)
@click.option(
    "--queries",
    type=click.Path(path_type=Path, exists=True),
    help="Queries to compare the models with: a file with one per line, or a folder in BEIR's format (adds NDCG).",
)
@click.option(
    "--shadow-share",
    default=SHARE,
    show_default=True,
    type=click.FloatRange(0, 1, min_open=True),
    help="Share of the requests that are copied to NEW_MODEL in the shadow step.",
)
@click.option(
    "--shadow-s",
    default=SHADOW_S,
    show_default=True,
    type=click.FloatRange(0),
    help="Seconds that the shadow step takes. 0: leave the step out.",
)
@click.option(
    "--shadow-requests",
    "shadow_copies",
    type=click.IntRange(1),
    help="End the shadow step earlier, when NEW_MODEL has encoded this number of copies.",
)
@click.option(
    "--yes",
    "accepts",
    is_flag=True,
    help="Continue even if the models agree less than --min-agreement, or rows have no vector.",
)
@click.option(
    "--step",
    "until",
    type=click.Choice([*UNTIL, BACK, CLEAN_UP]),
    default="flip",
    show_default=True,
    help=(
        "Last step to run. With --corpus, check includes the quality step. back: undo the flip. clean-up: remove the "
        "vectors that are not in use."
    ),
)
@cluster_options(GATEWAY_URL, CONFIG_URL)
@click.option("--json", "as_json", is_flag=True, help="Print a report as JSON. Progress goes to standard error.")
def migrate(cluster: Cluster, as_json: bool, **options: Any) -> None:
    """Move ALIAS from its present encoder to NEW_MODEL. Clients continue to use ALIAS during the migration.

    \b
    An index in PostgreSQL (pgvector) or Qdrant that stores its texts: --sink, --collection, --text
    1. check    checks the alias, both models, their widths, the index, and the rights of the user of the database
    2. embed    writes vectors of NEW_MODEL beside the present ones, also for rows that clients write meanwhile
    3. quality  compares the nearest neighbours of a sample of rows, or of --queries, by both vectors
    4. flip     searches of the index use the new vectors, and requests for ALIAS go to NEW_MODEL

    \b
    An index whose texts are in files: --corpus, --text
    1. check    checks the alias, both models and their widths, and that no vectors of another model are overwritten
    2. quality  both models encode a sample of the corpus; compares the nearest neighbours of each text
    3. embed    a job encodes the corpus with NEW_MODEL, into files or a new collection
    4. shadow   NEW_MODEL gets copies of some requests; measures its answers, which clients do not get
    5. flip     requests for ALIAS go to NEW_MODEL; from now on searches must use the new index

    \b
    sie models alias search BAAI/bge-m3                               creates the alias, once
    export SIE_JOBS_SINKS=main=postgresql://user:password@host/database
    sie migrate search my/model --sink main --collection docs --text "{title}\\n{body}"
    sie migrate search my/model --sink main --collection docs --text "{title}\\n{body}" --step back
    sie migrate search my/model --corpus docs.jsonl --text "{body}" --id id -o vectors --step shadow
    sie migrate search --step back                                    returns to the former model

    No step before flip changes what clients get. If the command was interrupted, killed or refused, run it again: it
    continues, because the database and the cluster store the progress. --step back returns to the former model, until
    --step clean-up has removed its vectors. For files, switch your search to the new index together with the flip:
    --step shadow stops before it.

    SIE_API_KEY is the token for the gateway, SIE_ADMIN_TOKEN for the config service.

    Status 0: done. 1: refused, the models do not agree enough, or the job failed. 2: no gateway answered, or an option
    is wrong. 130: Ctrl-C.
    """
    if options["text"] is not None:
        options["text"] = options["text"].replace("\\n", "\n")
    if bool(options["sink"]) != bool(options["collection"]):
        raise click.UsageError("--sink and --collection need each other: give both or neither")
    if options["sink"] and options["corpus"] is None:
        if not (options["model"] and options["text"]):
            raise click.UsageError("NEW_MODEL and --text are needed: the new model, and how to read the text of a row")
        _migrate_live(cluster, as_json, **options)
    else:
        _migrate_corpus(cluster, as_json, **options)


def _migrate_live(
    cluster: Cluster, as_json: bool, *, alias: str, sink: str, text: str, until: str, **options: Any
) -> None:
    """Migrate an index in use, whose database has the texts."""
    from sie_bulk_jobs.datasets.templates import Template
    from sie_bulk_jobs.settings import JobsSettings
    from sie_client import SIEAsyncClient
    from sie_migrate.live import LIVE_STEPS, LiveMigration, LivePlan
    from sie_migrate.migration import Aliases, MigrationReport
    from sie_migrate.quality import QuerySet

    if until == "shadow":
        raise click.UsageError("--step shadow: an index that is migrated in its database has no such step")
    context = click.get_current_context()
    for option in context.command.params:
        is_set = context.get_parameter_source(str(option.name)) == ParameterSource.COMMANDLINE
        if is_set and option.opts[0] in _CORPUS_OPTIONS:
            raise click.UsageError(f"{option.opts[0]}: only a migration with --corpus has this option")
    settings = cluster.settings
    assert isinstance(settings, JobsSettings)
    url = dict(settings.jobs_sinks or ()).get(sink)
    if url is None:
        raise click.UsageError(
            f"--sink {sink}: SIE_JOBS_SINKS has no database of this name. Set it for this command too, for example "
            f"SIE_JOBS_SINKS={sink}=postgresql://user:password@host:5432/database"
        )
    with refusing():
        template = Template.parsed(text, "--text")
    plan = LivePlan(
        alias,
        options["model"],
        sink,
        url.reveal(),
        options["collection"],
        template,
        options["vector"] or "",
        options["id_column"] or "",
        options["sample"],
        options["min_agreement"],
        QuerySet.read(options["queries"]).texts,
        options["accepts"],
        until,  # type: ignore[arg-type]
    )

    token = cluster.gateway_token

    def encoder() -> SIEAsyncClient:
        return SIEAsyncClient(
            cluster.gateway_urls[0], api_key=token.reveal() if token else None, connection_budget_s=None, progress=False
        )

    echo_line = functools.partial(click.echo, err=as_json)
    report = MigrationReport(echo_line, LIVE_STEPS)
    try:
        with service_of(cluster, writes=True) as service, gateway_client(cluster, SCOPE, is_patient=True) as client:
            LiveMigration(client, encoder, Aliases(service, WriteOptions(cluster)), plan, report, echo_line).run()
    except KeyboardInterrupt:
        note = _STOPPED_LIVE.get(report.step, "searches did not change; repeat the command to continue")
        click.echo(f"\nstopped in the step {report.step}: {note}", err=True)
        sys.exit(INTERRUPTED)
    if as_json:
        click.echo(display.document(report.facts))
    elif until == "flip":
        echo_line("to go back: the same command with --step back; to remove the old vectors: with --step clean-up")


def _migrate_corpus(
    cluster: Cluster,
    as_json: bool,
    *,
    alias: str,
    model: str | None,
    corpus: str | None,
    text: str | None,
    sink: str | None,
    collection: str | None,
    until: str,
    **options: Any,
) -> None:
    """Migrate an index whose texts are in files."""
    from sie_migrate.corpus import Corpus
    from sie_migrate.migration import Aliases, Migration, MigrationPlan, MigrationReport, back
    from sie_migrate.quality import QuerySet

    write = WriteOptions(cluster)
    echo_line = functools.partial(click.echo, err=as_json)
    if until == BACK:
        with service_of(cluster, writes=True) as service:
            aliases = Aliases(service, write)
            undone = back(aliases, aliases.read(alias), echo_line)
        if as_json:
            click.echo(display.document(undone))
        return
    if until == CLEAN_UP:
        raise click.UsageError("--step clean-up: old vectors are kept only if an index is migrated in its database")
    if not (model and corpus and text):
        raise click.UsageError(
            "NEW_MODEL, --text, and --corpus or --sink are needed: --text says how to read the texts from their source"
        )
    if options.pop("vector"):
        raise click.UsageError("--vector is only for --sink; the job of --corpus writes one vector for each text")
    plan = MigrationPlan(
        alias,
        model,
        Corpus.from_source(corpus, text, options.pop("id_column") or "", options.pop("input_format")),
        # no check for old files, because an earlier run of this migration may have filled the folder
        OutputPlace.from_option(options.pop("output"), is_new=False),
        {"sink": sink, "collection": collection} if sink and collection else {},
        until=UNTIL[until],  # type: ignore[arg-type]
        queries=QuerySet.read(options.pop("queries")),
        **options,
    )
    report = MigrationReport(echo_line)
    urls = cluster.gateway_urls
    try:
        with contextlib.ExitStack() as held:
            service = held.enter_context(service_of(cluster, writes=True))
            clients = []
            for url in urls:
                settings = dataclasses.replace(cluster.settings, gateway_url=url)
                one_gateway = dataclasses.replace(cluster, settings=settings)
                clients.append(held.enter_context(gateway_client(one_gateway, SCOPE, is_patient=True)))
            Migration(clients, urls[0], Aliases(service, write), plan, report, as_json).run()
    except KeyboardInterrupt:
        note = _STOPPED.get(report.step, "the alias did not change; repeat the command to continue")
        click.echo(f"\nstopped in the step {report.step}: {note.format(alias=alias)}", err=True)
        sys.exit(INTERRUPTED)
    if as_json:
        click.echo(display.document(report.facts))
    elif report.step == "flip":
        echo_line(f"to go back: sie migrate {alias} --step back{cluster.data_dir_option}")
    else:
        echo_line("to continue, repeat the command without --step")
