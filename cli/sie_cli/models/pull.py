"""`sie pull`: add a model to the catalogue, and fetch its weights to this disk."""

from __future__ import annotations

import dataclasses

import click

from sie_cli.cluster import CONFIG_URL, Cluster, cluster_options
from sie_cli.display import size
from sie_cli.models.inspect import weights_folder
from sie_cli.models.lookup import look_up
from sie_cli.refusal import refusing
from sie_cli.serve.preflight import held_bytes
from sie_contracts.settings import Settings


@click.command(short_help="Download models, to serve them later without the network.")
@click.argument("models", metavar="MODEL...", nargs=-1, required=True)
@cluster_options(CONFIG_URL, "SIE_MODELS_DIR", "SIE_LOCAL_CACHE", required=False)
def pull(cluster: Cluster, models: tuple[str, ...]) -> None:
    """Add each MODEL to the catalogue and fetch its weights. MODEL: a name in the catalogue, an id of the Hugging Face
    Hub, or a folder.

    A missing model is added to the models folder of the running `sie serve`, which serves it within seconds. If no
    `sie serve` runs, it is added to SIE_MODELS_DIR or ./models. The entry pins one commit: the only one that
    SIE_LOCAL_CACHE has of the model, or else the current one at the hub. The weights go into SIE_LOCAL_CACHE.

    \b
    sie pull BAAI/bge-small-en-v1.5
    sie models add ID --revision COMMIT         add another commit; --id gives another name
    """
    settings = where_served(cluster)
    is_served = cluster.local() is not None or cluster.is_given("SIE_MODELS_DIR")
    for spec in models:
        model = look_up(settings, spec)
        if model.message:
            click.echo(model.message)
            if not is_served:
                click.echo(
                    f"no `{cluster.serve}` is running; if you start one in the current folder, it has the model. "
                    "For a `sie serve` with another --data-dir, repeat this command with that --data-dir",
                    err=True,
                )
        with refusing():
            folder = weights_folder(settings, model.entry)
        click.echo(f"{model.name} is on this disk, {size(held_bytes(folder))}: {folder}")


def where_served(cluster: Cluster) -> Settings:
    """Return the settings. If a `sie serve` runs and SIE_MODELS_DIR is not set, take `models_dir` from that server."""
    running = cluster.local()
    if running is None or not running.models_dir or cluster.is_given("SIE_MODELS_DIR"):
        return cluster.settings
    return dataclasses.replace(cluster.settings, models_dir=running.models_dir)
