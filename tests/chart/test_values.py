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
import kubernetes_validate
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

from sie_contracts.settings import BY_NAME, MACHINE_PROFILE_DEFAULTS, ROWS, load, shown

Path = tuple[str, ...]
COMPONENTS = {"gateway": "gateway", "config": "config", "worker-sidecar": "sidecar", "adapter": "adapter"}
# For keys that have an effect only beside other values: those values.
BESIDE = {
    ("nats", "url"): {"nats": {"enabled": False, "url": "nats://b:4222"}},
    ("gateway", "replicas"): {"gateway": {"autoscaling": {"enabled": False}}},
    ("nats", "maxUnavailable"): {"nats": {"replicas": 5}},
    ("payloadStore", "existingClaim"): {"payloadStore": {"url": ""}},
    ("catalogue", "configMap"): {"catalogue": {"url": ""}},
    ("workers", "common", "bundle"): {"gateway": {"defaultMachineProfile": ""}},
    ("workers", "common", "gpu"): {"machineProfiles": {"l4": {"device": "auto", "gpu": None}}},
    ("machineProfiles", "cpu", "gpu"): {"machineProfiles": {"cpu": {"device": "auto"}}},
    ("machineProfiles", "l4", "gpu"): {"machineProfiles": {"l4": {"device": "auto"}}},
    ("workers", "groups", "cpu", "machineProfile"): {"workers": {"groups": {"cpu": {"gpu": False}}}},
    ("workers", "groups", "l4", "machineProfile"): {
        "workers": {"groups": {"l4": {"gpu": True}}},
        "gateway": {"defaultMachineProfile": ""},
    },
}
# For keys that the chart checks against others: values that it accepts.
OTHERWISE: dict[Path, Any] = {
    ("nats",): {"enabled": False, "url": "nats://b:4222"},
    ("auth", "mode"): "token",
    ("stream", "replicas"): 1,
    ("nats", "replicas"): 5,
    ("nats", "maxUnavailable"): 2,
    ("nats", "storage", "size"): "30Gi",
    ("nats", "storage", "maxFileStore"): "9Gi",
    ("gateway", "defaultMachineProfile"): "other",
    ("workers", "common", "gpuCount"): 3,  # the chart renders a list of as many words, and thousands take minutes
}


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


def others() -> dict[Path, Any]:
    """Return for each key another value of its type, which occurs nowhere else, or the opposite boolean."""
    changes: dict[Path, Any] = {}
    for number, (path, value) in enumerate(leaves(FULL), 30_011):
        if isinstance(value, bool):
            changes[path] = not value
        elif isinstance(value, int | float):
            changes[path] = number
        elif isinstance(value, str):
            changes[path] = f"x{number}"
        elif isinstance(value, list):
            changes[path] = [{"mark": f"x{number}"} if value and isinstance(value[0], dict) else number]
    return changes


@pytest.fixture(scope="module")
def base() -> str:
    return template("everything.yaml", CHOSEN)


@pytest.mark.long
def test_every_value_changes_what_is_rendered(base: str) -> None:
    """All texts and numbers are replaced at once and searched for in the output. Each boolean, and each value that is
    not found, is then changed alone.
    """
    changed: dict[str, Any] = {}
    alone = dict(OTHERWISE)
    for path, value in others().items():
        if path in alone or path == ("nats", "enabled"):
            continue
        if isinstance(value, bool) or path in BESIDE or path[:2] == ("workers", "groups"):
            alone[path] = value
        else:
            changed = overlaid(changed, at(path, value))
    text = template("everything.yaml", overlaid(CHOSEN, changed), "--skip-schema-validation")
    alone |= {path: value for path, value in leaves(changed) if re.search(r"x?\d{5}", str(value))[0] not in text}  # type: ignore[index]
    without_effect = set()
    for path, value in alone.items():
        beside = overlaid(CHOSEN, BESIDE.get(path, {}))
        before = template("everything.yaml", beside, "--skip-schema-validation") if path in BESIDE else base
        if template("everything.yaml", overlaid(beside, at(path, value)), "--skip-schema-validation") == before:
            without_effect.add(path)
    # no group here has these machine profiles
    assert {
        path
        for path in without_effect
        if path[:2] not in {("machineProfiles", name) for name in ("l4-spot", "a100-80gb", "h100")}
    } == set()
    assert len(alone) < 60, "most values should be found as they are: each of these is a call of helm"


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


@pytest.mark.parametrize("beside", [{}, CLAIMS_BESIDE])
@pytest.mark.parametrize("text", ["12", "null", "true"])
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


def test_every_key_says_what_it_is() -> None:
    """Each key has a comment above it, except well-known parts of a key with a comment."""
    lines = (CHART / "values.yaml").read_text().splitlines()
    assert len(lines) < 700
    bare = []
    for number, line in enumerate(lines):
        key = line.strip().partition(":")[0]
        if not line.strip() or line.strip().startswith(("#", "- ")):
            continue
        above = lines[number - 1].strip() if number else ""
        parts = (
            "requests",
            "limits",
            "cpu",
            "l4",
            "a100-80gb",
            "h100",
            "machineProfile",
            "device",
            "gpu",
            "gpuType",
            "tolerations",
        )
        if not above.startswith("#") and key not in parts:
            bare.append((number + 1, line))
    assert bare == []


def test_the_schema_knows_exactly_the_keys_of_the_values() -> None:
    schema = json.loads(chart_settings.SCHEMA.read_text())

    def keys(part: dict[str, Any], path: Path = ()) -> Iterator[Path]:
        part = schema["definitions"][part["$ref"].rpartition("/")[2]] if "$ref" in part else part
        for name, subschema in part.get("properties", {}).items():
            below = list(keys(subschema, (*path, name)))
            yield from below or [(*path, name)]

    def top(paths: Iterator[Path] | list[Path]) -> set[Path]:
        # keys whose names the operator chooses count as their parent
        free = {("workers", "groups"), ("machineProfiles",), ("settings",), ("workers", "common", "settings")}
        cut_paths = {
            next((path[: len(prefix)] for prefix in free if path[: len(prefix)] == prefix), path) for path in paths
        }
        return {path for path in cut_paths if "resources" not in path and path[-2:-1] != ("hubTokenSecret",)}

    schema_paths = {path for path in top(list(keys(schema))) if path != ("global",)}
    assert schema_paths == {
        path for path in top([path for path, _ in leaves(DEFAULTS)]) if path[-1] != "hubTokenSecret"
    }


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


PARTS = {
    **CHOSEN,
    "ingress": {"enabled": True},
    "mcp": {"enabled": True},
    "tracing": {"enabled": True},
    "workers": {"common": {"autoscaling": {"enabled": True}}},
    "monitoring": {"serviceMonitors": True, "prometheusRule": True, "dashboards": True},
}


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


def test_a_key_without_a_value_means_nothing_if_it_needs_none() -> None:
    needed = {tuple(path.split(".")) for path in chart_settings.required(DEFAULTS)}
    values: dict[str, Any] = {}
    for path, _ in leaves(DEFAULTS):
        if path not in needed and path[0] not in ("auth", "machineProfiles") and path[:2] != ("workers", "groups"):
            values = overlaid(values, at(path, None))
    for path in [("gateway", "resources"), ("workers", "common", "adapter", "resources"), ("settings",)]:
        values = overlaid(values, at(path, None))
    text = template(values=overlaid(values, PARTS))
    assert "nil" not in text
    for manifest in objects(text):
        if manifest["apiVersion"].partition("/")[0] not in ("keda.sh", "monitoring.coreos.com"):
            kubernetes_validate.validate(manifest, "1.31", strict=True)


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


def test_whatever_the_chart_writes_itself_is_rendered_somewhere() -> None:
    """A variable that no values file renders belongs in `settings`."""
    written = {
        name
        for file in FILES
        for _, _, container_spec in containers(rendered(file))
        for name in variables(container_spec)
    }
    configured = objects(template(values={**CHOSEN, "catalogue": {"configMap": "models"}}))
    written |= {name for _, _, container_spec in containers(configured) for name in variables(container_spec)}
    assert written >= chart_settings.OWN


@pytest.mark.parametrize("file", FILES)
def test_health_comes_from_heartbeats(file: str) -> None:
    modes = [
        value
        for _, _, container_spec in containers(rendered(file))
        if (value := variables(container_spec).get("SIE_GATEWAY_HEALTH_MODE")) is not None
    ]
    assert modes == ["nats"]


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


@pytest.mark.parametrize("place", ["common", "group", "machine profile"])
@pytest.mark.parametrize(("key", "name"), BATCHER.items())
def test_a_written_value_that_equals_the_documented_default_wins(place: str, key: str, name: str) -> None:
    """A written value is rendered, and a rendered value overrides the measured one of the machine profile."""
    documented = BY_NAME[name].default
    batcher = {"batcher": {key: documented}}
    written = {
        "common": {"workers": {"common": {"workerSidecar": batcher}}},
        "group": {"workers": {"groups": {"cpu": {"workerSidecar": batcher}}}},
        "machine profile": {"machineProfiles": {"cpu": batcher}},
    }[place]
    expected = [
        documented if variable == name else int(MACHINE_PROFILE_DEFAULTS["cpu"][variable])
        for variable in BATCHER.values()
    ]
    assert list(batching(written)["sie-worker-cpu"]) == expected


def test_a_group_without_a_gpu_has_what_was_measured_for_cpus_unless_somebody_wrote_a_value() -> None:
    """The name of the machine profile does not matter, and all measured settings apply."""
    groups = {
        "own": {"machineProfile": "c7i", "gpu": False},
        "l4": {"machineProfile": "l4"},
        "written": {
            "machineProfile": "cpu",
            "settings": {"SIE_MAX_CONCURRENT_BATCHES": 4},
            "workerSidecar": {"batcher": {"coalesceMs": 5}},
        },
    }
    manifests = objects(template(values=overlaid(CHOSEN, {"workers": {"groups": groups}})))
    values_by_worker = {}
    for workload, _, container_spec in containers(manifests):
        if container_spec["name"] == "worker-sidecar":
            environ = {
                name: value
                for name, value in variables(container_spec).items()
                if name in BY_NAME and isinstance(value, str)
            }
            settings = load(environ=environ).settings
            values_by_worker[workload] = [
                shown(row, getattr(settings, row.field))
                for row in map(BY_NAME.__getitem__, MACHINE_PROFILE_DEFAULTS["cpu"])
            ]
    measured = list(MACHINE_PROFILE_DEFAULTS["cpu"].values())
    documented = [shown(BY_NAME[name], BY_NAME[name].default) for name in MACHINE_PROFILE_DEFAULTS["cpu"]]
    written = {"SIE_MAX_CONCURRENT_BATCHES": "4", "SIE_BATCHER_COALESCE_MS": "5"}
    assert values_by_worker == {
        "sie-worker-cpu": measured,
        "sie-worker-own": measured,
        "sie-worker-l4": documented,
        "sie-worker-written": [written.get(name, value) for name, value in MACHINE_PROFILE_DEFAULTS["cpu"].items()],
    }


def test_what_nobody_wrote_is_left_to_the_process() -> None:
    """A null in a group does not override a value of common."""
    groups = {"cpu": {"workerSidecar": {"batcher": {"coalesceMs": None}}}}
    assert batching({"workers": {"groups": groups}})["sie-worker-cpu"] == (2, 64, 4096)
    common = {"workerSidecar": {"batcher": {"coalesceMs": 7}}}
    assert batching({"workers": {"groups": groups, "common": common}})["sie-worker-cpu"] == (7, 64, 4096)


def test_defaults_are_those_of_the_processes() -> None:
    batcher = DEFAULTS["workers"]["common"]["workerSidecar"]["batcher"]
    assert batcher == dict.fromkeys(BATCHER)
    assert not any("batcher" in profile for profile in DEFAULTS["machineProfiles"].values()), (
        "measured values are those of the processes"
    )
    text = (CHART / "values.yaml").read_text()
    for name in BATCHER.values():
        assert f"{name}, default {BY_NAME[name].default}:" in text
    same = {
        ("gateway", "requestTimeoutSeconds"): "SIE_GATEWAY_REQUEST_TIMEOUT",
        ("stream", "storage"): "SIE_STREAM_STORAGE",
        ("stream", "replicas"): "SIE_STREAM_REPLICAS",
        ("workers", "common", "bundle"): "SIE_BUNDLE",
        ("workers", "common", "device"): "SIE_DEVICE",
        ("workers", "common", "hubFallback"): "SIE_HF_FALLBACK",
        ("tracing", "endpoint"): "OTEL_EXPORTER_OTLP_ENDPOINT",
        ("tracing", "sampler"): "OTEL_TRACES_SAMPLER",
        ("tracing", "samplerArg"): "OTEL_TRACES_SAMPLER_ARG",
        ("tracing", "enabled"): "SIE_TRACING_ENABLED",
    }
    values = dict(leaves(DEFAULTS))
    assert {path: values[path] for path in same} == {path: BY_NAME[name].default for path, name in same.items()}
    assert values["tracing", "exporter"] == shown(
        BY_NAME["OTEL_TRACES_EXPORTER"], BY_NAME["OTEL_TRACES_EXPORTER"].default
    )


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


def test_a_gateway_knows_the_machine_profiles_of_all_groups() -> None:
    """The list of a gateway begins with the default machine profile if there is one, else with that of the first
    group.
    """
    groups = {
        "b": {"machineProfile": "h100"},
        "a": {"machineProfile": "l4"},
        "c": {"machineProfile": "l4"},
        "cpu": None,
    }

    def environ(default: str) -> dict[str, str]:
        values = {**CHOSEN, "workers": {"groups": groups}, "gateway": {"defaultMachineProfile": default}}
        return variables(container(objects(template(values=values)), "sie-gateway", "gateway"))

    assert environ("")["SIE_GATEWAY_CONFIGURED_GPUS"] == "l4,h100"
    assert "SIE_MACHINE_PROFILE" not in environ("")
    gateway_environ = environ("h100")
    assert (gateway_environ["SIE_GATEWAY_CONFIGURED_GPUS"], gateway_environ["SIE_MACHINE_PROFILE"]) == (
        "h100,l4",
        "h100",
    )


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
