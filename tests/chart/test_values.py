"""Every value of the chart changes the rendered objects and is documented, and every rendered variable has a reader in
its process.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import chart_settings
import jsonschema_rs
import pages
import pytest
import yaml
from helm import (
    CHART,
    CHOSEN,
    EVERYTHING,
    FILES,
    HelmError,
    arguments,
    container,
    containers,
    helm,
    objects,
    of_kind,
    rendered,
    template,
    variables,
)

from sie_contracts.settings import BY_NAME, ROWS, load

Path = tuple[str, ...]
COMPONENTS = {"gateway": "gateway", "config": "config", "worker-sidecar": "sidecar", "adapter": "adapter"}


def overlaid(below: Any, above: Any) -> Any:
    """Lay one values file over another as helm does."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        return copy.deepcopy(above)
    return {**below, **{key: overlaid(below.get(key), value) for key, value in above.items()}}


def leaves(values: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every key whose value is no map, and every empty map."""
    if isinstance(values, dict) and values:
        for key, value in values.items():
            yield from leaves(value, (*path, key))
    else:
        yield path, values


def at(path: Path, value: Any) -> dict[str, Any]:
    for key in reversed(path):
        value = {key: value}
    return dict(value)


DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())
FULL = overlaid(overlaid(DEFAULTS, yaml.safe_load(EVERYTHING.read_text())), CHOSEN)


# Values beside which the chart accepts one text in all keys: that text is the machine profile of each group.
TEXTS_BESIDE = {
    "workers": {
        "groups": {
            "cpu": {"gpu": False},
            "l4": {"gpu": True, "device": "auto", "bundle": "default"},
            "other": {"gpu": False, "bundle": "other"},
        }
    }
}
CLAIMS = [
    ("payloadStore", "existingClaim"),
    ("catalogue", "configMap"),
    ("workers", "common", "cache", "existingClaim"),
]
CLAIMS_BESIDE = {"payloadStore": {"url": ""}, "catalogue": {"url": ""}}


@pytest.mark.parametrize(("text", "beside"), [("12", {}), ("null", CLAIMS_BESIDE), ("true", {})])
def test_a_text_that_yaml_reads_as_another_type_stays_a_text(text: str, beside: dict[str, Any]) -> None:
    """A machine profile may be called 4090. Every text for which the schema accepts any name is replaced at once."""
    is_valid = jsonschema_rs.validator_for(json.loads(chart_settings.SCHEMA.read_text())).is_valid
    paths = [
        path
        for path, value in leaves(FULL)
        if isinstance(value, str) and (beside or path not in CLAIMS) and is_valid(at(path, "qqqq"))
    ]

    def manifests(name: str) -> str:
        values = overlaid(overlaid(CHOSEN, TEXTS_BESIDE), {**beside, "image": {"pullSecrets": [name]}})
        for path in paths:
            if is_valid(at(path, name)):
                values = overlaid(values, at(path, name))
        values["fullnameOverride"] = "sie"  # a number is no name of a Service
        release = helm("template", name, str(CHART), "--namespace", name, *arguments("everything.yaml"), values=values)
        rendered_objects = objects(release)
        stateful_set = of_kind("StatefulSet", rendered_objects)["sie-nats"]
        del stateful_set["spec"]["template"]["metadata"]["annotations"]["checksum/config"]
        return json.dumps(rendered_objects, sort_keys=True)

    plain = manifests("qqqq")
    assert plain.count("qqqq") > 200
    assert json.loads(manifests(text)) == json.loads(plain.replace("qqqq", text))


def test_the_keys_are_those_of_the_schema_and_of_the_defaults() -> None:
    """`python tests/chart_settings.py` writes these files."""
    schema = json.loads(chart_settings.SCHEMA.read_text())
    assert json.loads(chart_settings.REQUIRED.read_text()) == chart_settings.required(DEFAULTS)
    assert json.loads(chart_settings.KEYS.read_text()) == chart_settings.keys(schema)


def test_the_chart_accepts_each_setting_that_has_no_key_of_its_own() -> None:
    """The chart also has the settings of extras that are not installed here."""
    readers = chart_settings.readers()
    assert readers.items() <= json.loads(chart_settings.TABLE.read_text()).items()
    values = json.loads(chart_settings.SCHEMA.read_text())["definitions"]["settings"]["properties"]
    assert {name: values[name] for name in readers} == {
        name: chart_settings.value(BY_NAME[name].expected) for name in readers
    }
    assert {row.name for row in ROWS} >= chart_settings.OWN | chart_settings.LEFT_OUT


@pages.WHOLE
def test_the_chart_accepts_no_setting_that_nobody_reads() -> None:
    """`python tests/chart_settings.py` writes these files."""
    readers = chart_settings.readers()
    assert json.loads(chart_settings.TABLE.read_text()).keys() == readers.keys()
    schema = json.loads(chart_settings.SCHEMA.read_text())
    assert schema["definitions"]["settings"]["properties"].keys() == readers.keys()


@pytest.mark.parametrize("is_section", [False, True])
def test_a_key_without_a_value_is_refused_if_it_needs_one(is_section: bool) -> None:
    needed = chart_settings.required(DEFAULTS)
    sections = [path for path in needed if any(nested.startswith(f"{path}.") for nested in needed)]
    paths = [path for path in needed if (path in sections) == is_section and not (is_section and "." in path)]
    values: dict[str, Any] = {}
    for path in paths:
        values = overlaid(values, at(tuple(path.split(".")), None))
    with pytest.raises(HelmError, match=rf"{re.escape(', '.join(paths))}: there is no value; write one"):
        template(values=values)


def test_the_broker_of_the_chart_has_the_users_of_the_embedded_one() -> None:
    """`python tests/chart_settings.py` copies them."""
    assert chart_settings.USERS.read_text() == chart_settings.USERS_SOURCE.read_text()


@pytest.mark.parametrize("file", FILES)
def test_every_variable_has_a_reader_in_its_process_and_is_read(file: str) -> None:
    """Each process loads its environment without a warning."""
    for workload, _, container_spec in containers(rendered(file)):
        component = COMPONENTS.get(container_spec["name"])
        if component is None:
            continue
        environ = {
            name: value if isinstance(value, str) else "pod-0" for name, value in variables(container_spec).items()
        }
        assert len(environ) == len(container_spec["env"]), f"{workload} sets a variable twice"
        for name in environ:
            if name.startswith(("SIE_", "OTEL_")):
                assert component in BY_NAME[name].components, (workload, container_spec["name"], name)
                assert BY_NAME[name].mode in (None, "queue")
        configuration = load(environ=environ)
        assert not configuration.warnings
        assert environ["SIE_LOG_JSON"] == "true"


def test_settings_reach_every_process_that_reads_them_and_no_other() -> None:
    names = {
        "SIE_ACK_WAIT_S": 21,
        "SIE_MODEL_FILTER": "a/b,c/d",
        "SIE_QUEUE_MAX_BYTES": 2147483648,
        "SIE_DISK_CACHE_ENABLED": False,
    }
    second = {"machineProfile": "cpu", "settings": {"SIE_ACK_WAIT_S": 33}}
    workers = {"common": {"settings": {"SIE_IDLE_EVICT_S": 60}}, "groups": {"second": second}}
    manifests = objects(template(values={**CHOSEN, "settings": names, "workers": workers}))
    environs = {
        (workload, container_spec["name"]): variables(container_spec)
        for workload, _, container_spec in containers(manifests)
    }

    def readers(name: str) -> dict[str, str]:
        return {
            f"{workload}/{component}": environ[name]
            for (workload, component), environ in environs.items()
            if name in environ
        }

    assert readers("SIE_ACK_WAIT_S") == {
        "sie-gateway/gateway": "21",
        "sie-worker-cpu/worker-sidecar": "21",
        "sie-worker-second/worker-sidecar": "33",
    }
    assert readers("SIE_MODEL_FILTER") == {"sie-config/config": "a/b,c/d"}
    assert readers("SIE_QUEUE_MAX_BYTES") == {"sie-gateway/gateway": "2147483648"}
    assert set(readers("SIE_DISK_CACHE_ENABLED").values()) == {"false"}
    assert readers("SIE_IDLE_EVICT_S").keys() == {"sie-worker-cpu/worker-sidecar", "sie-worker-second/worker-sidecar"}


# batching


BATCHER = {
    "coalesceMs": "SIE_BATCHER_COALESCE_MS",
    "maxBatchRequests": "SIE_BATCHER_MAX_BATCH_REQUESTS",
    "maxBatchCost": "SIE_MAX_BATCH_COST",
}


def batching(values: dict[str, Any]) -> dict[str, tuple[int, int, int]]:
    """Return the settings of each worker-sidecar by workload: coalesce, requests, cost. Assert that no other container
    has one of the variables.
    """
    limits = {}
    for workload, _, container_spec in containers(objects(template(values=overlaid(CHOSEN, values)))):
        environ = variables(container_spec)
        if container_spec["name"] == "worker-sidecar":
            own = {name: value for name, value in environ.items() if name in (*BATCHER.values(), "SIE_MACHINE_PROFILE")}
            settings = load(environ=own).settings
            limits[workload] = (
                settings.batcher_coalesce_ms,
                settings.batcher_max_batch_requests,
                settings.max_batch_cost,
            )
        else:
            assert not environ.keys() & set(BATCHER.values())
    return limits


def test_batching_is_what_somebody_wrote_else_measured_else_documented() -> None:
    """The order is group > machine profile > common > measured for the machine profile > documented."""
    groups = {
        "l4": {"machineProfile": "l4"},
        "own": {"machineProfile": "l4", "workerSidecar": {"batcher": {"coalesceMs": 1}}},
    }
    workers: dict[str, Any] = {"groups": groups}
    expected = {"sie-worker-cpu": (2, 64, 4096), "sie-worker-l4": (5, 12, 16384), "sie-worker-own": (1, 12, 16384)}
    assert batching({"workers": workers}) == expected
    workers["common"] = {"workerSidecar": {"batcher": {"coalesceMs": 9, "maxBatchRequests": 24}}}
    assert batching({"workers": workers}) == {
        "sie-worker-cpu": (9, 24, 4096),
        "sie-worker-l4": (9, 24, 16384),
        "sie-worker-own": (1, 24, 16384),
    }
    assert batching(
        {"workers": workers, "machineProfiles": {"l4": {"batcher": {"coalesceMs": 0, "maxBatchCost": 99}}}}
    ) == {
        "sie-worker-cpu": (9, 24, 4096),
        "sie-worker-l4": (0, 24, 99),
        "sie-worker-own": (1, 24, 99),
    }


def test_false_and_zero_of_a_group_win_over_common() -> None:
    """helm's `merge` function would let the values of common win."""
    common = {"gpu": True, "autoscaling": {"enabled": True, "minReplicas": 2}, "hubFallback": True}
    group = {"machineProfile": "other", "gpu": False, "autoscaling": {"minReplicas": 0}, "hubFallback": False}
    manifests = objects(template(values=overlaid(CHOSEN, {"workers": {"common": common, "groups": {"other": group}}})))
    scaled = {
        manifest["metadata"]["name"]: manifest["spec"]["minReplicaCount"]
        for manifest in manifests
        if manifest["kind"] == "ScaledObject"
    }
    assert scaled == {"sie-worker-cpu": 2, "sie-worker-other": 0}
    adapter = container(manifests, "sie-worker-other", "adapter")
    assert "nvidia.com/gpu" not in adapter["resources"]["limits"]
    assert variables(adapter)["SIE_HF_FALLBACK"] == "false"


def test_large_numbers_are_rendered_without_an_exponent() -> None:
    """Numbers of a values file are floats, which Go prints as 2e+06, and Kubernetes refuses such an integer."""
    is_valid = jsonschema_rs.validator_for(json.loads(chart_settings.SCHEMA.read_text())).is_valid
    values = CHOSEN
    for path, value in leaves(FULL):
        # other values of NATS limit this one
        is_number = isinstance(value, int) and not isinstance(value, bool) and path != ("nats", "maxUnavailable")
        if is_number and is_valid(overlaid(FULL, at(path, 2_000_000))):
            values = overlaid(values, at(path, 2_000_000))
    assert re.findall(r".*\de\+\d.*", template("everything.yaml", values)) == []
