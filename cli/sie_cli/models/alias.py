"""`sie models alias`: create or change an alias, with its models and its shadow (a model that gets request copies)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click
import msgspec
from msgspec import UNSET

from sie_cli.models.catalogue import report_write
from sie_cli.models.service import MODELS, WriteOptions, path_of, write_options
from sie_cli.refusal import CommandRefused
from sie_contracts.api.configs import ConfigModels, ListedModel

DEFAULT_SHARE = 0.1


@click.command()
@click.argument("name", metavar="NAME")
@click.argument("targets", metavar="MODEL[=WEIGHT]...", nargs=-1, required=True)
@click.option(
    "--shadow",
    metavar="MODEL[=SHARE]",
    help=f"Model that gets copies of this share of the requests.  [default share: {DEFAULT_SHARE:g}]",
)
@write_options("Allow models whose results cannot be compared. An index would then mix their vectors.")
def alias(write: WriteOptions, name: str, targets: tuple[str, ...], shadow: str | None) -> None:
    """Set the models to which an alias leads. Requests for NAME go to MODEL until the alias is changed again. MODEL is
    written as in a request, with optional @revision and :profile.

    With several models, the key of a request selects one by weight, so the same key gets the same model. The key is the
    API key, or the header X-SIE-Route-Key. A shadow gets copies of requests. Clients do not get its answers: these are
    compared, and counted in the gateways' metrics sie_gateway_shadow_*.

    \b
    sie models alias search BAAI/bge-m3                            requests for `search` go to BAAI/bge-m3
    sie models alias search BAAI/bge-m3 --shadow my/model=0.05     measure my/model beside it
    sie models alias rank old/reranker=90 new/reranker=10          a tenth of the keys get the new one
    sie models alias search my/model                               flip; `sie models rollback search N` goes back
    sie models compare BAAI/bge-m3 my/model --sample texts.txt     what would change
    """
    patch: dict[str, Any] = {"alias": [_target(text) for text in targets], "force": write.force or None}
    patch["shadow"] = None if shadow is None else _shadow(shadow)
    with write.service() as service:
        listed: list[ListedModel] = service.read(MODELS, ConfigModels).body.models
        present = next((model for model in listed if model.model_id == name), None)
        if present is not None and present.alias is UNSET:
            raise CommandRefused(f"{name} is a model: give the alias another name, or remove the model first")
        if present is not None:
            # PATCH keeps the alias's other fields, such as its description
            method, path, body = "PATCH", path_of(name), patch
        else:
            method, path = "POST", MODELS
            body = {"id": name, **{key: value for key, value in patch.items() if value is not None}}
        how = replace(write, force=False)
        answer = service.write(method, path, msgspec.json.encode(body), how=how)
    report_write(write, answer)


def _target(text: str) -> dict[str, Any]:
    model, equals, weight = text.rpartition("=")
    if not equals:
        return {"model": text}
    if not weight.isascii() or not weight.isdigit() or not model:
        raise click.BadParameter(
            f"{text[:100]}: expected MODEL or MODEL=WEIGHT with a whole number, such as my/model=90"
        )
    return {"model": model, "weight": int(weight)}


def _shadow(text: str) -> dict[str, Any]:
    model, equals, share = text.rpartition("=")
    if not equals:
        return {"model": text, "share": DEFAULT_SHARE}
    try:
        return {"model": model, "share": float(share)}
    except ValueError as error:
        raise click.BadParameter(
            f"{text[:100]}: expected MODEL or MODEL=SHARE with a number up to 1, such as my/model=0.05"
        ) from error
