"""A real Prometheus scrapes a loaded cluster: its rules load, every panel of the dashboard shows something."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator

import httpx
import promql_parser as promql
import pytest
from cluster import until
from metrics_page import every
from monitoring import NAMESPACE, boards, filled, panels, parts_of, proven
from prometheus_server import Prometheus
from stack import Device, Plan, Stack

pytestmark = [pytest.mark.debian, pytest.mark.serial]
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CLIENTS = 12
WAIT_S = 90.0
ENVIRON = {"SIE_CHUNK_COST": "256", "SIE_GATEWAY_CONFIGURED_GPUS": "cpu,l4"}


class Load:
    """Clients that ask one request after the other, so that there is always something in the queue."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._over = threading.Event()
        self.statuses: list[int] = []
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        headers = {
            "X-SIE-Priority": ("interactive", "bulk")[number % 2],
            "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01",
        }
        if number == 0:  # requests that are late
            headers["X-SIE-Timeout-Ms"] = "20"
        if number == 1:  # requests for which there is no worker
            headers |= {"X-SIE-MACHINE-PROFILE": "l4", "X-SIE-Timeout-Ms": "2000"}
        with httpx.Client(base_url=self._url, trust_env=False, timeout=60, headers=headers) as client:
            while not self._over.is_set():
                path = f"/v1/encode/toy/{('one', 'two')[number % 3 == 0]}"
                self.statuses.append(client.post(path, json={"items": ["a few words"] * 40}).status_code)

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)


@pytest.fixture(scope="module")
def scraping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    plan = Plan(models=("toy/one", "toy/two"), workers=(Device(batch_ms=150), Device(batch_ms=150)), environ=ENVIRON)
    with Stack(folder / "stack", plan) as stack:
        prometheus = Prometheus(folder, stack)
        load = None
        try:
            load = Load(stack.urls[0])
            until(prometheus.is_scraping, WAIT_S, "all targets up")
            yield prometheus
            assert 200 in load.statuses
        finally:
            if load is not None:
                load.end()
            prometheus.stop()


def test_every_panel_shows_something(scraping: Prometheus) -> None:
    left = dict.fromkeys(panels())

    def shown() -> bool:
        for panel in list(left):
            samples = scraping.query(panel[1])
            if samples and any(sample["value"][1] != "NaN" for sample in samples):
                del left[panel]
        return {expression for _, expression in left} <= proven()

    try:
        until(shown, WAIT_S, "data in every panel")
    except AssertionError:
        raise AssertionError(f"nothing in {[panel for panel in left if panel[1] not in proven()]}") from None


def test_every_line_of_a_panel_can_be_told_from_the_others(scraping: Prometheus) -> None:
    """Each line has a legend of its own."""
    answered = 'rate(sie_gateway_request_latency_seconds_count{endpoint="encode"}[30s]) > 0'
    until(lambda: scraping.query(answered), WAIT_S, "the route is a label of its own")
    for board in boards().values():
        for panel in board["panels"]:
            names = [
                re.sub(r"{{(\w+)}}", lambda part, of=sample["metric"]: of.get(part[1], ""), target["legendFormat"])
                for target in panel.get("targets", ())
                for sample in scraping.query(filled(target["expr"]))
            ]
            assert len(set(names)) == len(names) <= 20, (panel["title"], names)
            assert all(names), panel["title"]


def test_every_rule_is_evaluated_and_none_fires(scraping: Prometheus) -> None:
    def evaluated() -> bool:
        rules = scraping.ask("rules")
        return bool(rules) and all(rule["health"] == "ok" for group in rules["groups"] for rule in group["rules"])

    until(evaluated, WAIT_S, "all rules evaluated")
    (group,) = scraping.ask("rules")["groups"]
    assert len(group["rules"]) > 12
    assert [rule["name"] for rule in group["rules"] if rule["state"] == "firing"] == []


def test_what_alerts_look_at_is_there(scraping: Prometheus) -> None:
    (group,) = scraping.ask("rules")["groups"]
    names = {
        part.name
        for rule in group["rules"]
        for part in parts_of(promql.parse(rule["query"]))
        if isinstance(part, promql.VectorSelector)
    }
    assert names <= {name for metric in every().values() for name in metric.exported}
    for name in names:
        until(lambda name=name: scraping.query(f'{name}{{namespace="{NAMESPACE}"}}'), WAIT_S, name)


def test_latencies_lead_to_traces(scraping: Prometheus) -> None:
    for name in ("sie_gateway_request_latency_seconds_bucket", "sie_request_duration_seconds_bucket"):
        until(
            lambda name=name: scraping.ask("query_exemplars", query=name, start="0", end="9999999999"),
            WAIT_S,
            "an exemplar",
        )
        all_series = scraping.ask("query_exemplars", query=name, start="0", end="9999999999")
        assert {exemplar["labels"]["trace_id"] for series in all_series for exemplar in series["exemplars"]} == {TRACE}
