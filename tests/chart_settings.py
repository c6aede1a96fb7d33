"""Generated files of the chart, from the table of all settings.

    python tests/chart_settings.py

writes files/settings.json of the chart, with the processes that read each setting, and types and bounds into
values.schema.json. It copies files/nats-users.conf from `sie serve`, so both brokers give each user the same
permissions. It writes the keys of the schema into files/keys.json: the schema itself refuses no unknown key, because
templates refuse it with the name of a similar one. It writes the keys that need a value into files/required.json: the
schema does not see a null, because helm removes the key.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

import sie_broker
from sie_contracts.settings import BY_NAME, ROWS

CHART = Path(__file__).parents[1] / "charts" / "sie-cluster"
TABLE = CHART / "files" / "settings.json"
KEYS = CHART / "files" / "keys.json"
REQUIRED = CHART / "files" / "required.json"
SCHEMA = CHART / "values.schema.json"
USERS = CHART / "files" / "nats-users.conf"
USERS_SOURCE = Path(sie_broker.__file__).parent / "nats" / "users.conf"

# Settings that templates write themselves, from other keys of values.yaml or from facts that only the chart knows.
OWN = frozenset(
    {
        "SIE_ADMIN_TOKEN",
        "SIE_AUTH_MODE",
        "SIE_AUTH_TOKENS",
        "SIE_BATCHER_COALESCE_MS",
        "SIE_BATCHER_MAX_BATCH_REQUESTS",
        "SIE_BUNDLE",
        "SIE_CLUSTER_CACHE",
        "SIE_CONFIG_READ_TOKEN",
        "SIE_CONFIG_SERVICE_URL",
        "SIE_DEVICE",
        "SIE_DISK_CACHE_BYTES",
        "SIE_GATEWAY_CONFIGURED_GPUS",
        "SIE_GATEWAY_HEALTH_MODE",
        "SIE_GATEWAY_K8S_NAMESPACE",
        "SIE_GATEWAY_K8S_PORT",
        "SIE_GATEWAY_K8S_SERVICE",
        "SIE_GATEWAY_KUBERNETES",
        "SIE_GATEWAY_METRICS_PORT",
        "SIE_GATEWAY_REQUEST_TIMEOUT",
        "SIE_GATEWAY_URL",
        "SIE_GPU_COUNT",
        "SIE_GPU_TYPE",
        "SIE_HF_FALLBACK",
        "SIE_IPC_SOCKET_PATH",
        "SIE_LOCAL_CACHE",
        "SIE_LOG_JSON",
        "SIE_MACHINE_PROFILE",
        "SIE_MAX_BATCH_COST",
        "SIE_MODELS_DIR",
        "SIE_NATS_PASSWORD",
        "SIE_NATS_STREAMS_PASSWORD",
        "SIE_NATS_URL",
        "SIE_PAYLOAD_STORE_URL",
        "SIE_POOL",
        "SIE_PRELOAD_MODELS",
        "SIE_ROOT_PATH",
        "SIE_STREAM_REPLICAS",
        "SIE_STREAM_STORAGE",
        "SIE_TRACING_ENABLED",
        "SIE_WORKER_ID",
        "SIE_WORKER_METRICS_PORT",
    }
)
# Keys whose null means that the field is left out, or that there is none.
NULLABLE = frozenset({"batcher", "egressPorts", "interval", "pullPolicy", "resources", "spread"})
# Settings that would be wrong in a pod: workers by URL.
LEFT_OUT = frozenset({"SIE_GATEWAY_WORKERS"})


def readers() -> dict[str, list[str]]:
    """Return the components that read each setting that has no key of its own."""
    return {
        row.name: sorted(row.components)
        for row in sorted(ROWS, key=lambda row: row.name)
        if row.name.startswith("SIE_")
        and not row.secret
        and row.mode != "standalone"
        and row.name not in OWN | LEFT_OUT
    }


def table() -> str:
    lines = [f"  {json.dumps(name)}: {json.dumps(components)}" for name, components in readers().items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def value(expected: str) -> dict[str, Any]:
    """Return the schema of the values of a setting, from its description of them."""
    if expected == "true or false":
        return {"type": "boolean"}
    if expected.startswith("one of "):
        return {"enum": expected.removeprefix("one of ").split(", ")}
    number = re.fullmatch(r"a (whole )?number (from|of at least|above) (\S+)(?: (?:to|and at most) (\S+))?", expected)
    if number is None:
        return {"type": "string"}
    whole, word, low, high = number.groups()
    least = {"exclusiveMinimum" if word == "above" else "minimum": json.loads(low)}
    return {"type": "integer" if whole else "number", **least, **({"maximum": json.loads(high)} if high else {})}


def schema(document: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of the chart with the present settings."""
    names = list(readers())
    document["definitions"]["settings"] |= {"properties": {name: value(BY_NAME[name].expected) for name in names}}
    return document


def keys(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the keys that values may have, each with the keys below it, or True if those are not checked. `*` is any
    name.
    """

    def below(part: dict[str, Any]) -> Any:
        if "$ref" in part:
            part = schema["definitions"][part["$ref"].rpartition("/")[2]]
        if "properties" in part:
            return {name: below(member) for name, member in part["properties"].items()}
        more = part.get("additionalProperties")
        subtree = below(more) if isinstance(more, dict) else True
        return True if subtree is True else {"*": subtree}

    return {**below(schema), "global": True}


def required(values: dict[str, Any], above: str = "") -> list[str]:
    """Return the keys that need a value, with the keys above them: those whose default is not empty, false or 0. A
    group or a machine profile needs none of its own.
    """
    names = list[str]()
    for name, default in values.items():
        if default and name not in NULLABLE:
            names.append(f"{above}{name}")
            if isinstance(default, dict) and name not in ("groups", "machineProfiles"):
                names += required(default, f"{above}{name}.")
    return names


def main() -> None:
    TABLE.write_text(table())
    USERS.write_text(USERS_SOURCE.read_text())
    document = schema(json.loads(SCHEMA.read_text()))
    SCHEMA.write_text(json.dumps(document, indent=2) + "\n")
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    REQUIRED.write_text(json.dumps(required(values), indent=1) + "\n")
    KEYS.write_text(json.dumps(keys(document), indent=1) + "\n")


if __name__ == "__main__":
    main()
