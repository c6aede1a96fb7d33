"""Command group `sie models`, with the commands of this package."""

from __future__ import annotations

import click

from sie_cli.models import catalogue, residency
from sie_cli.models.add import add
from sie_cli.models.alias import alias
from sie_cli.models.importing import import_command
from sie_cli.models.inspect import inspect
from sie_cli.options import AnyPosition, Commands


@click.group(
    cls=AnyPosition,
    commands=Commands({}, "sie.commands.models"),
    short_help="Look at models, add and change them.",
)
def models() -> None:
    """Inspect models, add them to the catalogue of a running cluster, and change them there.

    \b
    sie models inspect ./my-model              print the catalogue entry of a folder
    sie models inspect ./my-model --check      also load the model and show its answer
    sie models inspect BAAI/bge-small-en-v1.5  print the entry of a hub repository
    sie models add ./my-model --id my/model    write the entry where `sie serve` reads it, or send it to a config
                                               service

    \b
    At a gateway, with its SIE_ADMIN_TOKEN or a key with the scope admin:
    sie models load my/model --wait            load it on a worker before the first request
    sie models unload my/model                 free its memory; the next request loads it again

    \b
    With a config service (--url, SIE_CONFIG_SERVICE_URL) and its SIE_ADMIN_TOKEN:
    sie models list                            list the models
    sie models import ./models --dry-run       add a folder of model files, also in the format of the public SIE
    sie models show my/model                   print its configuration, in the form that `add` and `set -f` read
    sie models set my/model max_tokens=128     change it; --dry-run only checks, --if-match N refuses unless it is at
                                               revision N
    sie models history my/model                list its revisions; `rollback my/model 3` restores revision 3,
                                               `rm my/model` removes the model
    sie models status my/model                 show which gateways and workers serve which revision
    sie models alias search my/model           send requests for `search` to my/model
    """


for _command in (inspect, add, import_command, *catalogue.COMMANDS, alias, *residency.COMMANDS):
    models.add_command(_command)
