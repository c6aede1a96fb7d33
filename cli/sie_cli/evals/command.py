"""`sie eval`: the command.

task ──► each source ──► metrics ──► table, differences, targets ──► exit code
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from sie_cli.cluster import GATEWAY_URL, Cluster, cluster_options
from sie_cli.display import counted, table
from sie_cli.evals import quality, targets, tasks
from sie_cli.evals.own_cluster import own_cluster
from sie_cli.evals.report import Report
from sie_cli.evals.sources import DIALECTS, PATIENCE_S, SentenceTransformers, Server, Sie, Source
from sie_cli.refusal import Refused
from sie_contracts.settings import Secret, public_url

CONNECT_S = 10.0  # to a gateway that somebody named
LOAD_S = 900.0  # for a model that no worker has yet
PLAIN = ("sie", "st", "targets")
EXIT_MISSED = 1


@click.command(name="eval", short_help="How good a model is, beside other servers and what is expected.")
@click.argument("model")
@click.option(
    "-t",
    "--task",
    "task_name",
    required=True,
    metavar="TASK",
    help=f"{', '.join(tasks.SHIPPED)}, or a folder in the format of BEIR: {tasks.FILES}.",
)
@click.option(
    "-s",
    "--sources",
    default="sie",
    show_default=True,
    metavar="SOURCE,...",
    help="Who answers, and what is expected: sie, st, targets, sie:URL, openai:URL, tei:URL, infinity:URL.",
)
@click.option(
    "--targets",
    "targets_file",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="File of targets.  [default: that of the catalogue]",
)
@click.option(
    "--save-targets",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write what the first source reached into this file, as targets.",
)
@click.option("--markdown", type=click.Path(path_type=Path, dir_okay=False), help="Write the report as Markdown.")
@cluster_options(GATEWAY_URL)
@click.option("--json", "as_json", is_flag=True, help="The figures as JSON.")
def evaluate(
    cluster: Cluster,
    model: str,
    task_name: str,
    sources: str,
    targets_file: Path | None,
    save_targets: Path | None,
    markdown: Path | None,
    as_json: bool,
) -> None:
    """Measure how good MODEL is on a task, from several sources side by side.

    \b
    Sources, with commas between them; the first is compared with each other one:
      sie            the cluster that --url names or that runs on this machine; without one a cluster is started
      sie:URL        another cluster
      st             sentence-transformers in this process, in float32
      openai:URL, infinity:URL, tei:URL   a server of somebody else
      targets        what the file of targets expects; exit code 1 where the first source is below

    \b
    Tasks:
      stsb             how alike two sentences are (Spearman's rank correlation)
      stsb-retrieval   find the sentence that says the same (NDCG@10, MAP, recall)
      FOLDER           your own documents, queries and judgements

    \b
    sie eval sentence-transformers/all-MiniLM-L6-v2 -t stsb -s sie,st
    sie eval BAAI/bge-m3 -t my-documents/ -s sie,targets --save-targets targets.yaml
    """
    asked = _asked(sources)
    task = tasks.find(task_name)
    file = targets_file or targets.packaged()
    expected = targets.of(file, model, task.name) if "targets" in asked else {}
    found: list[quality.Found] = []
    with contextlib.ExitStack() as held:
        opened: list[Source] = []
        for name in asked:
            if name != "targets":
                opened.append(_source(name, cluster, model, opened, held))
        from sie_sdk.errors import SIEConnectionError, SIEError

        for source in opened:
            try:
                found.append(quality.measure(task, source))
            except SIEConnectionError as error:
                raise Refused(f"{source.name}: {error}: the cluster went away; nothing was measured") from error
            except SIEError as error:
                raise Refused(f"{source.name}: {error}") from error
    report = Report(model, task.name, _counts(task), found, expected, targets.missed(expected, found[0]))
    if save_targets is not None:
        targets.save(save_targets, model, task.name, found[0])
    if markdown is not None:
        try:
            markdown.write_text(report.markdown(), "utf-8")
        except OSError as error:
            raise Refused(f"--markdown {markdown}: {error.strerror}") from error
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(report.figures())))
    else:
        click.echo(f"{model} on {task.name}: {_counts(task)}")
        table(report.rows())
        for note in report.notes():
            click.echo(note)
    if report.missed:
        raise SystemExit(EXIT_MISSED)


def _asked(sources: str) -> Sequence[str]:
    """Raises Refused."""
    asked = [each.strip() for each in sources.split(",") if each.strip()]
    for each in asked:
        kind, _, url = each.partition(":")
        if each not in PLAIN and not (kind in (*DIALECTS, "sie") and url.startswith(("http://", "https://"))):
            kinds = ", ".join([*PLAIN, "sie:URL", *(f"{kind}:URL" for kind in DIALECTS)])
            raise Refused(f"-s: there is no source {each[:200]}: expected some of {kinds}")
    if len(set(asked)) != len(asked):
        raise Refused("-s: a source is named twice")
    if not [each for each in asked if each != "targets"]:
        raise Refused("-s: name a source that is measured, such as sie,targets")
    return asked


def _source(name: str, cluster: Cluster, model: str, before: Sequence[Source], held: contextlib.ExitStack) -> Source:
    """Raises Refused. Whether the model scores is known of the sources before it, if one is a cluster."""
    kind, _, url = name.partition(":")
    if kind == "sie":
        return _of_cluster(name, url, cluster, model, held)
    scores_pairs = before[0].scores_pairs if before else _scores_pairs(model)
    if name == "st":
        return SentenceTransformers(model, scores_pairs=scores_pairs)
    import httpx

    client = held.enter_context(httpx.Client(base_url=url.rstrip("/"), timeout=PATIENCE_S))
    return Server(name, client, DIALECTS[kind], model, scores_pairs=scores_pairs)


def _scores_pairs(model: str) -> bool:
    """By the catalogue of this installation; what that does not know has vectors."""
    from sie_config.overlay import Overlay
    from sie_contracts.entries import ModelEntry
    from sie_contracts.settings import Settings

    known: Any = Overlay(Settings()).folders().models.get(model.partition(":")[0], (None, ""))[0]
    return isinstance(known, ModelEntry) and "dense" not in known.outputs


def _of_cluster(name: str, url: str, cluster: Cluster, model: str, held: contextlib.ExitStack) -> Source:
    from sie_sdk import SIEClient
    from sie_sdk.errors import SIEConnectionError, SIEError

    token: Secret | None = None
    if url:
        where = url  # the token of another cluster is nobody's business
    elif not cluster.is_named and not cluster.is_given(GATEWAY_URL) and not _answers(cluster.gateway_urls[0]):
        started = held.enter_context(own_cluster())
        where, token = started.gateway_url, Secret(started.admin_token) if started.admin_token else None
    else:
        where, token = cluster.gateway_urls[0], cluster.gateway_token
    try:
        client = held.enter_context(
            SIEClient(where, api_key=token.reveal() if token else None, connection_budget_s=CONNECT_S)
        )
        source = Sie(name, client, model)
        client.wait_for_capacity(model, capacity_budget_s=LOAD_S)
    except SIEConnectionError as error:
        raise Refused(f"{error}\nno gateway answers at {public_url(where)}: {cluster.without_gateway()}") from error
    except SIEError as error:
        hint = "`sie models list` shows what there is"
        raise Refused(f"{error}\nasked the gateway at {public_url(where)}: {hint}") from error
    return source


def _answers(url: str) -> bool:
    """Whether anybody listens there. A `sie serve` that was killed has left its address behind."""
    import httpx

    try:
        httpx.get(f"{url}/healthz", timeout=CONNECT_S)
    except httpx.TransportError:
        return False
    return True


def _counts(task: tasks.Task) -> str:
    if isinstance(task, tasks.Similarity):
        return counted(len(task.gold), "pair")
    return f"{counted(len(task.queries), 'query', 'queries')}, {counted(len(task.corpus), 'document')}"
