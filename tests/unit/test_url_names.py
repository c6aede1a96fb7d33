"""Names that lead to other routes are refused by every method and command that puts a name into a path."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from sie_cli.models import residency, service
from sie_cli.refusal import CommandRefused
from sie_client import InvalidInputError, cluster, files, jobs, verbs
from sie_client.core import BlockingWork, Plan, Send, Session, Together
from sie_contracts.url_names import quoted

ODD = (
    *("", ".", "..", "../jobs/x/cancel", "../models/m/unload", "a/..", "a/../b", "a/./b", "a//b", "/a", "a/"),
    *("%2e%2e/pools", "a%2fb", "a\\..\\b", "a?b", "a#b", "a\n", "a\x00b", "\x7f", "\x85", "\ud800"),
)
GOOD = {
    "org/model:fast@2": "org/model:fast@2",
    "...": "...",
    "a b": "a%20b",
    "é": "%C3%A9",
    "default/l4/x": "default/l4/x",
}
S = Session()
# each plan whose path has a name, by the argument of the name
PLANS: dict[str, dict[str, Callable[[str], Plan[Any]]]] = {
    "model": {
        "encode": lambda name: verbs.encode(name, ["a"], {}, S),
        "embed": lambda name: verbs.embed(name, ["a"], 1, {}, S),
        "score": lambda name: verbs.score(name, "a", ["b"], {}, S),
        "extract": lambda name: verbs.extract(name, ["a"], {"labels": ["x"]}, S),
        "redact": lambda name: verbs.redact(name, ["a"], None, {}, S),
        "get_model": lambda name: cluster.get_model(name, S),
        "warmed": lambda name: cluster.warmed(name, {}, S),
    },
    "lane": {"scaling": lambda name: cluster.scaling(name, S)},
    "name": {
        "get_pool": lambda name: cluster.get_pool(name, S),
        "renew_pool": lambda name: cluster.renew_pool(name, S),
        "delete_pool": lambda name: cluster.delete_pool(name, S),
    },
    "file": {
        "get": lambda name: files.get(name, S),
        "content": lambda name: files.content(name, S),
        "saved": lambda name: files.saved(name, "out", None, S),
        "deleted": lambda name: files.deleted(name, S),
    },
    "job": {
        "get": lambda name: jobs.get(name, S),
        "steered": lambda name: jobs.steered(name, "cancel", S),
        "retried": lambda name: jobs.retried(name, S),
        "deleted": lambda name: jobs.deleted(name, S),
        "rows": lambda name: jobs.rows(name, 1, None, S),
        "manifest": lambda name: jobs.manifest(name, S),
        "waited": lambda name: jobs.waited(name, 1.0, None, S),
    },
}


def requests_of(plan: Plan[Any]) -> Iterator[Send]:
    """Yield the requests that a plan sends before it needs an answer. Do its blocking work."""
    reply: object = None
    while True:
        try:
            step = plan.send(reply)
        except StopIteration:
            return
        if isinstance(step, Send):
            yield step
            return
        if isinstance(step, Together):
            for inner in step.plans:
                yield from requests_of(inner)
            return
        assert isinstance(step, BlockingWork), step
        reply = step.function()


@pytest.mark.parametrize("name", ODD)
def test_a_name_that_leads_to_another_route_is_refused_before_it_is_sent(name: str) -> None:
    for argument, plans in PLANS.items():
        for method, plan in plans.items():
            with pytest.raises(InvalidInputError, match=rf"^{argument}: expected ") as refused:
                raise AssertionError((method, list(requests_of(plan(name)))))
            assert refused.value.code == "INVALID_INPUT"


@pytest.mark.parametrize("name", GOOD)
def test_another_name_is_a_part_of_the_path(name: str) -> None:
    assert quoted(name, "model") == GOOD[name]
    for plan in (*PLANS["model"].values(), *PLANS["lane"].values(), *PLANS["name"].values()):
        for request in requests_of(plan(name)):
            sent = httpx.Request("GET", httpx.URL("http://host").join(request.path)).url.raw_path.decode()
            assert sent == request.path
            assert f"/{GOOD[name]}" in sent


def test_every_plan_with_a_name_in_its_path_is_tested() -> None:
    """A plan that calls `quoted` or `identifier` is one of PLANS, or is called by one."""
    callers = {
        name
        for module in (cluster, files, jobs, verbs)
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__
        and {"quoted", "identifier", "_path"} & set(function.__code__.co_names)
    }
    of_others = {"_path", "_send_parts", "_part"}  # _part uses the id of a job from the server
    assert callers - {method for plans in PLANS.values() for method in plans} == of_others


@pytest.mark.parametrize("name", ODD)
def test_a_command_refuses_such_a_name(name: str) -> None:
    for path in (service.path_of, residency._path):
        with pytest.raises(CommandRefused, match=r"^model: expected a name"):
            path(name)
