"""`sie models`: the group of the commands in this package."""

from __future__ import annotations

import click

from sie_cli.models import catalogue, residency
from sie_cli.models.add import add
from sie_cli.models.alias import alias
from sie_cli.models.compare import compare
from sie_cli.models.importing import import_command
from sie_cli.models.inspect import inspect
from sie_cli.options import AnyPosition


@click.group(cls=AnyPosition, short_help="Look at models, add and change them.")
def models() -> None:
    """Look at models, add them to the catalogue and change them there, while it serves.

    \b
    sie models inspect ./my-model              what the folder is, as a catalogue entry
    sie models inspect ./my-model --check      load it too and show what it answers
    sie models inspect BAAI/bge-small-en-v1.5  the same for a repository of the hub
    sie models add ./my-model --id my/model    write the entry where `sie serve` reads it, or give it to a config
                                               service

    \b
    At a gateway, with its SIE_ADMIN_TOKEN or a key with the scope admin:
    sie models load my/model --wait            have a worker load it before the first request
    sie models unload my/model                 free its memory; the next request loads it again

    \b
    With a config service (--url, SIE_CONFIG_SERVICE_URL) and its SIE_ADMIN_TOKEN:
    sie models list                            what there is
    sie models import ./models --dry-run       add a folder of model files, also of those of the public SIE
    sie models show my/model                   the configuration, which `add` and `set -f` take back
    sie models set my/model max_tokens=128     change it; --dry-run only checks, --if-match N refuses if it is not at
                                               revision N
    sie models history my/model                what it was; `rollback my/model 3` makes that the newest again, `rm`
                                               removes it
    sie models status my/model                 which gateways and workers serve which revision
    sie models alias search my/model           requests for `search` go to my/model; `compare A B` says what another one
                                               would change
    """


for _command in (inspect, add, import_command, *catalogue.COMMANDS, alias, compare, *residency.COMMANDS):
    models.add_command(_command)
