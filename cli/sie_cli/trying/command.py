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
from sie_cli.gateway_client import gateway_client, quiet_client
from sie_cli.refusal import CommandRefused

if TYPE_CHECKING:
    from sie_cli.trying.asking import ModelAnswer
    from sie_client import SIEClient

F = TypeVar("F", bound=Callable[..., Any])
POLL_S, SERVED_S = 0.25, 30.0


def _question_options(command: F) -> F:
    """Add the options of a question. The command is called with a function that sends the question to a model and
    prints the answer."""

    @click.argument("model")
    @click.argument("texts", metavar="TEXT...", nargs=-1)
    @click.option("--query", "-q", metavar="TEXT", help="Rank the texts by how well they answer this. - or @FILE too.")
    @click.option("--labels", "-l", metavar="A,B", multiple=True, help="Find these in the texts. May be repeated.")
    @click.option(
        "--threshold",
        metavar="NUMBER",
        type=click.FloatRange(0, 1),
        help="How sure the model has to be of what it finds.",
    )
    @click.option("--explain", is_flag=True, help="Show each stage of the request as a bar.")
    @cluster_options(GATEWAY_URL)
    @click.option("--json", "as_json", is_flag=True, help="Print the reply as JSON, for programs.")
    @functools.wraps(command)
    def run(cluster: Cluster, model: str, **question: Any) -> None:
        command(cluster, model, **question)

    return cast(F, run)


@click.command("try")
@_question_options
def try_model(cluster: Cluster, model: str, **question: Any) -> None:
    """Ask MODEL about one TEXT or more, and show the answer.

    What is shown follows the model. One that encodes: the vector of each text, and the cosine of each pair; the
    strongest words of a sparse vector. One that scores: the texts, ranked for --query. One that extracts: what it
    found, marked in the text.

    \b
    sie try sentence-transformers/all-MiniLM-L6-v2 "a cat" "a kitten" "a tax form"
    sie try BAAI/bge-reranker-v2-m3 --query "Who wrote the first program?" "Paris." "Ada Lovelace, in 1843."
    sie try gliner-community/gliner_medium-v2.5 --labels person,place "Ada met Charles in London."
    sie try openai/clip-vit-base-patch32 @cat.jpg "a photo of a cat"
    git log -1 --format=%B | sie try BAAI/bge-m3 - --explain

    - is standard input, as one text. @FILE is an image, a sound or a document, where the model takes it; a text that
    begins with @ is written @@. Texts that begin with - stand behind --. `sie models list` shows the models. Where the
    gateway wants a token: SIE_API_KEY; without it SIE_ADMIN_TOKEN, but only for the gateway that SIE_GATEWAY_URL
    names.

    Status 0: answered. 1: refused, or a text has no result. 2: no gateway answered, or an option is wrong.
    """
    _print_answer(cluster, model, **question)


@click.command("run", short_help="Ask MODEL as `sie try` does, and add it before if need be.")
@_question_options
def run_model(cluster: Cluster, model: str, **question: Any) -> None:
    """Ask MODEL about one TEXT or more, as `sie try` does. A model that the `sie serve` of this machine lacks is added
    first, as `sie pull` does: an id of the Hugging Face Hub, or a folder.

    \b
    sie run BAAI/bge-small-en-v1.5 "a cat" "a kitten" "a tax form"
    sie run ./my-model "a text"
    """
    _print_answer(cluster, _served(cluster, model), **question)


def _served(cluster: Cluster, model: str) -> str:
    """Return the name under which the gateway serves a model. A missing model is added. Raises CommandRefused."""
    from sie_cli.models.lookup import look_up
    from sie_cli.models.pull import where_served

    with gateway_client(cluster, "the scope read") as client, quiet_client():
        if not Path(model).is_dir() and _serves(client, model):
            return model
        if cluster.local() is None:
            client.get_model(model)  # this call raises the error: a remote server cannot read a local folder
        named = look_up(where_served(cluster), model)
        if named.message:
            click.echo(named.message, err=True)
        end_s = time.monotonic() + SERVED_S
        while not _serves(client, named.name):
            if time.monotonic() >= end_s:
                raise CommandRefused(
                    f"{named.name} is not served after {SERVED_S:g} s: `sie models list` shows what is"
                )
            time.sleep(POLL_S)  # the pause between two checks whether the models folder has been read
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
    """Print the answer of a model. The process ends with status 1 if an input has no result."""
    from rich.console import Console

    from sie_cli.trying.asking import Question, ask_model, read
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
            info = client.get_model(model)
        try:
            answer = ask_model(client, info, question, url, secret.reveal() if secret else None)
        except InvalidInputError as error:
            if error.reason != "labels_required":
                raise
            raise CommandRefused(printable(f"{error}; name them with --labels a,b")) from error
    if as_json:
        click.echo(json_of(answer))
    else:
        console = Console(highlight=False)
        has_colours = console.color_system is not None and not console.no_color
        for part in shown(answer, console.width, has_colours=has_colours):
            console.print(part, soft_wrap=False)
    if answer.failed:
        sys.exit(1)


def json_of(answer: ModelAnswer) -> str:
    """Return the reply."""
    from sie_cli.trying.asking import reply

    return document(reply(answer))
