"""Commands `sie try` and `sie run`."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from sie_cli.cluster import GATEWAY_URL, Cluster, cluster_options
from sie_cli.display import document, printable
from sie_cli.gateway_client import ModelDescription, described, gateway_client, quiet_client
from sie_cli.refusal import CommandRefused

if TYPE_CHECKING:
    from sie_client import SIEClient

F = TypeVar("F", bound=Callable[..., Any])
POLL_S, SERVED_S = 0.25, 30.0


def _question_options(command: F) -> F:
    @click.argument("model")
    @click.argument("texts", metavar="TEXT...", nargs=-1)
    @click.option(
        "--query",
        "-q",
        metavar="TEXT",
        help="Rank the texts by how well they answer this query. It may be - or @FILE, like TEXT.",
    )
    @click.option(
        "--labels",
        "-l",
        metavar="A,B",
        multiple=True,
        help="Labels to find in the texts, such as person,place. May be repeated.",
    )
    @click.option(
        "--threshold",
        metavar="NUMBER",
        type=click.FloatRange(0, 1),
        help="Lowest score that a result may have, from 0 to 1.",
    )
    @click.option("--explain", is_flag=True, help="Show the time of each stage of the request as a bar.")
    @cluster_options(GATEWAY_URL)
    @click.option("--json", "as_json", is_flag=True, help="Print the reply as JSON, for programs.")
    @functools.wraps(command)
    def run(cluster: Cluster, model: str, **question: Any) -> None:
        command(cluster, model, **question)

    return cast(F, run)


@click.command("try")
@_question_options
def try_model(cluster: Cluster, model: str, **question: Any) -> None:
    """Send one or more TEXTs to MODEL, and show the answer.

    The display depends on the model. For encode: the vector of each text, the cosine of each pair, and the words with
    the largest weights of a sparse vector. For score: the texts, ranked for --query. For extract: the found entities,
    marked in the text.

    \b
    sie try sentence-transformers/all-MiniLM-L6-v2 "a cat" "a kitten" "a tax form"
    sie try BAAI/bge-reranker-v2-m3 --query "Who wrote the first program?" "Paris." "Ada Lovelace, in 1843."
    sie try gliner-community/gliner_medium-v2.5 --labels person,place "Ada met Charles in London."
    sie try openai/clip-vit-base-patch32 @cat.jpg "a photo of a cat"
    git log -1 --format=%B | sie try BAAI/bge-m3 - --explain

    TEXT may be - for standard input as one text, or @FILE for an image, a sound or a document if the model accepts it.
    Write a text that begins with @ as @@, and texts that begin with - after --. `sie models list` shows the models. If
    the gateway requires a token: set SIE_API_KEY. Without it, SIE_ADMIN_TOKEN is sent, but only to the gateway that
    SIE_GATEWAY_URL names.

    Status 0: each text has a result. 1: refused, or a text has no result. 2: no gateway answered, or an option is
    wrong.
    """
    _print_answer(cluster, model, **question)


@click.command("run", short_help="Ask MODEL as `sie try` does. A missing MODEL is added first.")
@_question_options
def run_model(cluster: Cluster, model: str, **question: Any) -> None:
    """Send one or more TEXTs to MODEL, as `sie try` does. If the `sie serve` of this machine lacks MODEL (an id of the
    Hugging Face Hub, or a folder), this command adds it first, as `sie pull` does.

    \b
    sie run BAAI/bge-small-en-v1.5 "a cat" "a kitten" "a tax form"
    sie run ./my-model "a text"
    """
    _print_answer(cluster, _served(cluster, model), **question)


def _served(cluster: Cluster, model: str) -> str:
    """Return the name under which the gateway serves a model. Add a missing model first. Raises CommandRefused."""
    from sie_cli.models.lookup import look_up
    from sie_cli.models.pull import where_served

    with gateway_client(cluster, "the scope read") as client, quiet_client():
        if not Path(model).is_dir() and _serves(client, model):
            return model
        if cluster.local() is None:
            if Path(model).is_dir():
                raise CommandRefused(
                    f"{model} is a folder, which only a `sie serve` of this machine can read, and none runs: start one"
                )
            # Without a local `sie serve`, nothing would read an added entry. This call raises the gateway's error.
            client.get_model(model)
        named = look_up(where_served(cluster), model)
        if named.message:
            click.echo(named.message, err=True)
        end_s = time.monotonic() + SERVED_S
        while not _serves(client, named.name):
            if time.monotonic() >= end_s:
                raise CommandRefused(
                    f"{named.name} is not served after {SERVED_S:g} s: `sie models list` shows the served "
                    "models; the log of `sie serve` may have the reason"
                )
            time.sleep(POLL_S)  # wait until `sie serve` has read its models folder again
        return named.name


def _serves(client: SIEClient, name: str) -> bool:
    from sie_client.errors import ModelNotFoundError

    try:
        client.get_model(name)
    except ModelNotFoundError:
        return False
    return True


def _print_answer(
    cluster: Cluster,
    model: str,
    texts: tuple[str, ...],
    query: str | None,
    labels: tuple[str, ...],
    threshold: float | None,
    explain: bool,
    as_json: bool,
) -> None:
    from rich.console import Console

    from sie_cli.trying.asking import Question, ask_model, read, reply
    from sie_cli.trying.shown import shown
    from sie_client.errors import InvalidInputError

    named = tuple(label for group in labels for label in (part.strip() for part in group.split(",")) if label)
    if labels and not named:
        raise CommandRefused("--labels is empty: name what to find, as in --labels person,place")
    inputs, question_input = read(texts, query)
    question = Question(model, inputs, question_input, named, threshold, explain)
    url, secret = cluster.gateway_urls[0], cluster.gateway_token
    with gateway_client(cluster, "the scopes read and infer") as client:
        with quiet_client():
            info = described(client.get_model(model), ModelDescription)
        try:
            answer = ask_model(client, info, question, url, secret.reveal() if secret else None)
        except InvalidInputError as error:
            if error.reason != "labels_required":
                raise
            raise CommandRefused(printable(f"{error}; name them with --labels a,b")) from error
    if as_json:
        click.echo(document(reply(answer)))
    else:
        console = Console(highlight=False)
        has_colours = console.color_system is not None and not console.no_color
        for part in shown(answer, console.width, has_colours=has_colours):
            console.print(part, soft_wrap=False)
    if answer.failed:
        sys.exit(1)
