"""`sie try`: the command."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from sie_cli.cluster import GATEWAY_URL, Cluster, cluster_options
from sie_cli.display import document, printable
from sie_cli.gateway_client import gateway_client, quiet_client
from sie_cli.refusal import CommandRefused

if TYPE_CHECKING:
    from sie_cli.trying.asking import ModelAnswer


@click.command("try")
@click.argument("model")
@click.argument("texts", metavar="TEXT...", nargs=-1)
@click.option("--query", "-q", metavar="TEXT", help="Rank the texts by how well they answer this. - or @FILE too.")
@click.option("--labels", "-l", metavar="A,B", multiple=True, help="Find these in the texts. May be repeated.")
@click.option(
    "--threshold", metavar="NUMBER", type=click.FloatRange(0, 1), help="How sure the model has to be of what it finds."
)
@click.option("--explain", is_flag=True, help="Show each stage of the request as a bar.")
@cluster_options(GATEWAY_URL)
@click.option("--json", "as_json", is_flag=True, help="Print the reply as JSON, for programs.")
def try_model(
    cluster: Cluster,
    model: str,
    texts: tuple[str, ...],
    query: str | None,
    labels: tuple[str, ...],
    threshold: float | None,
    explain: bool,
    as_json: bool,
) -> None:
    """Ask MODEL about one TEXT or more, and show the answer.

    What is shown follows the model. One that encodes: the vector of each text, and the cosine of each pair; the
    strongest words of a sparse vector. One that scores: the texts, ranked for --query. One that extracts: what it
    found, marked in the text.

    \b
    sie try sentence-transformers/all-MiniLM-L6-v2 "a cat" "a kitten" "a tax form"
    sie try BAAI/bge-reranker-v2-m3 --query "Who wrote the first program?" "Paris." "Ada Lovelace, in 1843."
    sie try urchade/gliner_multi-v2.1 --labels person,place "Ada met Charles in London."
    sie try openai/clip-vit-base-patch32 @cat.jpg "a photo of a cat"
    git log -1 --format=%B | sie try BAAI/bge-m3 - --explain

    - is standard input, as one text. @FILE is an image, a sound or a document, where the model takes it; a text that
    begins with @ is written @@. Texts that begin with - stand behind --. `sie models list` shows the models. Where the
    gateway wants a token: SIE_AUTH_TOKEN; without it SIE_ADMIN_TOKEN, but only for the gateway that SIE_GATEWAY_URL
    names.

    Status 0: answered. 1: refused, or a text has no result. 2: no gateway answered, or an option is wrong.
    """
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
    """The reply."""
    from sie_cli.trying.asking import reply

    return document(reply(answer))
