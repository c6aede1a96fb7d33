"""One place reads the environment, every setting has a reader where its row says, and every setting has a test of its
effect.

EFFECTS is the list of these tests: a new setting gets a line there with the test of its effect.
"""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import distribution
import measure
import of_extras
import pytest

from sie_contracts import settings
from sie_contracts.settings import BY_NAME, COMPONENTS, ROWS, SettingRow

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.xdist_group("sources")  # one process parses all files

ANSWERS = "tests/unit/test_answer_keys.py"
DISK = "tests/unit/test_weights_disk.py"
PLACEMENT = "tests/unit/test_placement_sidecar.py"
TRUST = "tests/unit/test_trust.py"
STATUS = "tests/unit/test_status.py"
KUBERNETES = "tests/unit/test_kubernetes.py"
TRACING = "tests/unit/test_tracing.py"
BATCHING, GATEWAY, WORKER = (
    f"tests/unit/test_settings_effects_{name}.py" for name in ("batching", "gateway", "worker")
)
ADAPTER, CONFIG, BROKER, LOGS = (
    f"tests/unit/test_settings_effects_{name}.py" for name in ("adapter", "config", "broker", "logs")
)

EFFECTS = {
    "SIE_DEVICE": f"{ADAPTER}::test_the_named_device_is_used_and_reported_and_an_absent_one_ends_the_start",
    "SIE_MODELS_DIR": f"{CONFIG}::test_the_models_folder_is_laid_over_the_packaged_catalogue",
    "SIE_ALLOW_REMOTE_CODE": f"{TRUST}::test_code_that_nobody_allowed_is_refused_and_the_setting_named",
    "SIE_MODEL_PATHS": f"{TRUST}::test_paths_are_allowed_below_the_named_folders_and_the_models_folder_alone",
    "SIE_MODEL_FILTER": f"{CONFIG}::test_the_filter_leaves_the_named_models_alone_and_an_unknown_name_ends_the_start",
    "SIE_GPU_TYPE": f"{WORKER}::test_the_gpu_type_overrides_the_detected_label_in_health",
    "SIE_LOCAL_CACHE": f"{ADAPTER}::test_weights_are_looked_up_in_the_local_cache_first",
    "SIE_CLUSTER_CACHE": f"{ADAPTER}::test_weights_come_from_the_cluster_cache_before_the_hub",
    "SIE_HF_FALLBACK": f"{ADAPTER}::test_without_the_fallback_the_hub_is_never_asked",
    "HF_HOME": f"{ADAPTER}::test_the_local_cache_is_hf_home_where_it_is_not_set",
    "SIE_MAX_BATCH_REQUESTS": f"{BATCHING}::test_max_batch_requests_bounds_the_items_of_a_batch_with_standalone_only",
    "SIE_MAX_BATCH_WAIT_MS": (
        f"{BATCHING}::test_max_batch_wait_is_how_long_a_lone_item_waits_for_an_expected_one_with_standalone_only"
    ),
    "SIE_MAX_BATCH_COST": f"{BATCHING}::test_max_batch_cost_bounds_the_tokens_of_a_batch",
    "SIE_MAX_CONCURRENT_REQUESTS": f"{GATEWAY}::test_each_gateway_refuses_what_is_beyond_its_concurrent_requests",
    "SIE_MAX_ITEMS_PER_REQUEST": f"{GATEWAY}::test_a_request_may_have_this_many_items_and_not_one_more",
    "SIE_RUST_PIPELINE_DEPTH": f"{WORKER}::test_the_pipeline_depth_is_how_many_batches_are_sent_ahead",
    "SIE_BATCHER_COALESCE_MS": f"{BATCHING}::test_coalescing_joins_what_arrives_within_the_window_in_queue_mode_only",
    "SIE_BATCHER_MAX_BATCH_REQUESTS": (
        f"{BATCHING}::test_batcher_max_requests_bounds_the_items_of_a_batch_in_queue_mode_only"
    ),
    "SIE_ADAPTIVE_MIN_QUANTUM_MS": (
        f"{BATCHING}::test_gathering_lasts_the_shortest_quantum_when_nothing_comes_or_answers_are_late"
    ),
    "SIE_ADAPTIVE_MAX_QUANTUM_MS": (
        f"{BATCHING}::test_gathering_lasts_up_to_the_longest_quantum_while_deliveries_keep_coming"
    ),
    "SIE_ADAPTIVE_TARGET_P50_MS": (
        f"{BATCHING}::test_gathering_is_the_longer_the_further_the_median_is_below_its_target"
    ),
    "SIE_CHUNK_COST": f"{GATEWAY}::test_a_request_is_cut_into_messages_of_about_the_chunk_cost_with_equal_results",
    "SIE_ADOPT_AFTER_MS": f"{PLACEMENT}::test_a_model_gets_one_more_host_when_work_waits_longer_than_allowed",
    "SIE_GATEWAY_URL": f"{PLACEMENT}::test_only_assigned_pools_are_served_and_the_read_token_is_shown",
    "SIE_POOL_ADMISSION_ENABLED": f"{PLACEMENT}::test_without_admission_nothing_is_asked",
    "SIE_KEY_WINDOW_TOKENS": (
        f"{GATEWAY}::test_a_key_has_so_many_tokens_in_the_queue_at_each_priority_and_gateways_share_them"
    ),
    "SIE_LOAD_HOLD_S": f"{GATEWAY}::test_a_cold_lane_is_held_for_this_long_and_not_for_the_whole_budget",
    "SIE_BULK_MAX_OVERTAKES": f"{BATCHING}::test_bulk_work_is_overtaken_at_most_this_often",
    "SIE_NATS_URL": f"{BROKER}::test_all_traffic_goes_over_the_named_broker",
    "SIE_NATS_PASSWORD": f"{BROKER}::test_a_password_may_have_any_character_and_stands_in_no_url",
    "SIE_NATS_STREAMS_PASSWORD": "tests/chart/test_nats.py::test_the_processes_do_all_their_work_as_their_users",
    "SIE_GATEWAY_HEALTH_MODE": (
        f"{STATUS}::test_in_mode_ws_workers_are_known_by_their_sockets_and_in_mode_nats_by_their_heartbeats"
    ),
    "SIE_GATEWAY_WORKERS": (
        f"{STATUS}::test_in_mode_ws_workers_are_known_by_their_sockets_and_in_mode_nats_by_their_heartbeats"
    ),
    "SIE_GATEWAY_KUBERNETES": f"{KUBERNETES}::test_pods_appear_and_disappear_with_the_events_of_the_api",
    "SIE_GATEWAY_K8S_NAMESPACE": f"{KUBERNETES}::test_namespace_service_and_port_say_where_workers_are_looked_for",
    "SIE_GATEWAY_K8S_SERVICE": f"{KUBERNETES}::test_namespace_service_and_port_say_where_workers_are_looked_for",
    "SIE_GATEWAY_K8S_PORT": f"{KUBERNETES}::test_namespace_service_and_port_say_where_workers_are_looked_for",
    "SIE_GATEWAY_CONFIGURED_GPUS": (
        f"{GATEWAY}::test_only_configured_machine_profiles_may_be_asked_for_also_without_a_worker"
    ),
    "SIE_CONFIG_SERVICE_URL": (
        f"{BROKER}::test_without_a_config_service_the_packaged_catalogue_serves_and_nothing_waits"
    ),
    "SIE_PAYLOAD_STORE_URL": "tests/unit/test_payloads.py::test_a_text_that_no_message_holds_goes_through_the_store",
    "SIE_PAYLOAD_TTL_S": (
        "tests/unit/test_payloads.py::test_an_object_lives_as_long_as_it_should_also_when_it_is_written_again"
    ),
    "SIE_INLINE_PAYLOAD_BYTES": f"{GATEWAY}::test_text_over_the_inline_limit_is_refused_with_the_limit",
    "SIE_ADMIN_TOKEN": f"{GATEWAY}::test_the_admin_token_passes_everywhere_and_without_one_admin_routes_are_closed",
    "SIE_CONFIG_READ_TOKEN": (
        f"{CONFIG}::test_the_export_is_read_with_the_read_token_or_the_admin_token_and_nothing_else"
    ),
    "SIE_AUTH_MODE": f"{GATEWAY}::test_the_auth_mode_decides_whether_a_token_is_needed",
    "SIE_AUTH_TOKEN": f"{GATEWAY}::test_the_auth_token_passes_user_routes_and_no_admin_route",
    "SIE_POOL_WRITE_ROLE": "tests/unit/test_auth.py::test_pool_writes_are_for_users_or_for_administrators_alone",
    "SIE_AUTH_TOKENS": f"{GATEWAY}::test_every_one_of_the_auth_tokens_passes_until_it_is_dropped",
    "SIE_NATS_CONFIG_TRUSTED_PRODUCERS": f"{GATEWAY}::test_deltas_are_taken_from_trusted_producers_alone",
    "SIE_GATEWAY_API_METRICS": (
        f"{GATEWAY}::test_metrics_are_on_the_api_port_too_where_that_is_wanted_and_the_token_has_their_scope"
    ),
    "SIE_GATEWAY_METRICS_PORT": f"{GATEWAY}::test_metrics_have_a_port_of_their_own_that_is_never_behind_a_token",
    "SIE_GATEWAY_REQUEST_TIMEOUT": f"{GATEWAY}::test_the_budget_of_a_request_ends_it_and_what_was_queued_never_runs",
    "SIE_DEFAULT_MODELS": f"{GATEWAY}::test_the_default_models_answer_what_names_none",
    "SIE_CORS_ORIGINS": "tests/unit/test_origins.py::test_pages_of_listed_origins_read_answers",
    "SIE_MAX_BODY_BYTES": f"{GATEWAY}::test_a_body_may_have_this_many_bytes_and_not_one_more",
    "SIE_MIN_BODY_RATE": f"{GATEWAY}::test_a_body_must_come_at_the_least_rate",
    "SIE_BODY_MEMORY_BYTES": f"{GATEWAY}::test_bodies_that_take_more_memory_than_allowed_are_told_to_come_again",
    "SIE_ALLOWED_HOSTS": "tests/unit/test_origins.py::test_every_listener_checks_the_names_that_the_setting_lists",
    "SIE_ROOT_PATH": f"{GATEWAY}::test_a_root_path_is_stripped_and_named_in_the_document",
    "SIE_CACHE_EXCLUDED_MODELS": f"{ANSWERS}::test_the_settings_name_who_uses_cached_answers",
    "SIE_CACHE_SHARED": f"{ANSWERS}::test_the_settings_name_who_uses_cached_answers",
    "SIE_STREAM_STORAGE": f"{BROKER}::test_queued_work_survives_the_broker_in_files_and_not_in_memory",
    "SIE_STREAM_REPLICAS": f"{BROKER}::test_three_brokers_hold_three_copies",
    "SIE_QUEUE_MAX_BYTES": f"{GATEWAY}::test_a_full_work_stream_refuses_the_newest_and_answers_all_it_accepted",
    "SIE_POOL": f"{WORKER}::test_work_of_a_pool_is_taken_by_workers_of_that_pool_only",
    "SIE_BUNDLE": f"{WORKER}::test_a_model_is_served_by_workers_of_its_bundle_only",
    "SIE_IPC_SOCKET_PATH": (
        f"{WORKER}::test_the_sidecar_speaks_on_its_socket_path_and_its_log_names_it_while_nobody_is_there"
    ),
    "SIE_MAX_CONCURRENT_BATCHES": f"{WORKER}::test_never_more_batches_are_in_progress_than_allowed",
    "SIE_IPC_POOL_SIZE": f"{WORKER}::test_the_pool_has_so_many_connections_and_one_for_control",
    "SIE_WORKER_METRICS_PORT": f"{WORKER}::test_metrics_and_probes_of_the_sidecar_answer_on_its_port",
    "SIE_WORKER_ID": f"{WORKER}::test_the_worker_id_is_in_results_heartbeats_and_logs",
    "SIE_MACHINE_PROFILE": f"{WORKER}::test_the_machine_profile_is_what_requests_are_routed_by",
    "SIE_GPU_COUNT": f"{WORKER}::test_the_gpu_count_is_shown_by_the_gateway",
    "SIE_WORKER_PING_INTERVAL_MS": f"{WORKER}::test_the_adapter_is_pinged_at_the_interval",
    "SIE_WORKER_READYZ_STALE_MULT": f"{WORKER}::test_a_frozen_adapter_makes_the_worker_unready_after_so_many_intervals",
    "SIE_WORKER_CONFIG_POLL_INTERVAL_MS": (
        f"{WORKER}::test_a_changed_catalogue_is_noticed_at_the_poll_and_a_corrupted_one_at_the_full_export"
    ),
    "SIE_WORKER_CONFIG_FULL_EXPORT_INTERVAL_MS": (
        f"{WORKER}::test_a_changed_catalogue_is_noticed_at_the_poll_and_a_corrupted_one_at_the_full_export"
    ),
    "SIE_HEALTH_PUBLISH_INTERVAL_MS": f"{WORKER}::test_heartbeats_come_at_the_interval",
    "SIE_HEARTBEAT_TIMEOUT_MS": f"{GATEWAY}::test_a_silent_worker_counts_until_its_heartbeats_are_overdue",
    "SIE_ACK_WAIT_S": f"{GATEWAY}::test_work_of_a_silent_worker_goes_to_another_after_the_ack_wait",
    "SIE_MEMORY_PRESSURE_THRESHOLD_PERCENT": (
        f"{ADAPTER}::test_the_least_recently_used_model_goes_when_memory_passes_the_threshold"
    ),
    "SIE_DISK_CACHE_ENABLED": f"{DISK}::test_without_the_disk_cache_nothing_is_removed",
    "SIE_DISK_PRESSURE_THRESHOLD_PERCENT": f"{DISK}::test_what_was_used_longest_ago_goes_above_the_threshold",
    "SIE_DISK_CACHE_BYTES": f"{DISK}::test_a_limit_below_the_disk_s_counts_the_cache_alone",
    "SIE_IDLE_EVICT_S": f"{WORKER}::test_an_idle_model_is_unloaded_and_without_the_setting_it_stays",
    "SIE_PRELOAD_MODELS": f"{WORKER}::test_preloaded_models_are_loaded_before_the_worker_is_ready",
    "SIE_SWAP_AFTER_MS": "tests/unit/test_swapping.py::test_a_busy_model_makes_room_for_one_that_waited_so_long",
    "SIE_LOG_JSON": f"{LOGS}::test_each_process_writes_json_lines_or_plain_ones",
    "SIE_TRACING_ENABLED": f"{TRACING}::test_enabled_a_request_is_one_trace_and_disabled_the_collector_gets_nothing",
    "OTEL_SDK_DISABLED": f"{TRACING}::test_a_disabled_sdk_traces_nothing",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": (
        f"{TRACING}::test_what_is_said_of_traces_comes_before_what_is_said_of_all_signals"
    ),
    "OTEL_EXPORTER_OTLP_PROTOCOL": f"{TRACING}::test_spans_go_to_the_collector_over_http",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": (
        f"{TRACING}::test_what_is_said_of_traces_comes_before_what_is_said_of_all_signals"
    ),
    "OTEL_PROPAGATORS": f"{TRACING}::test_without_the_propagator_a_client_s_context_is_left_alone",
    "OTEL_SERVICE_NAME": f"{TRACING}::test_spans_are_told_by_the_service_name_and_components_by_their_own",
    "OTEL_TRACES_EXPORTER": f"{TRACING}::test_spans_go_to_the_collector_to_the_console_or_nowhere",
    "OTEL_EXPORTER_OTLP_ENDPOINT": (
        f"{TRACING}::test_the_named_collector_gets_the_spans_and_one_that_is_away_hurts_nobody"
    ),
    "OTEL_TRACES_SAMPLER": f"{TRACING}::test_the_sampler_decides_and_every_process_decides_alike",
    "OTEL_TRACES_SAMPLER_ARG": f"{TRACING}::test_the_rate_is_the_share_of_traces_that_are_sampled",
    "SIE_PREPROCESSOR_WORKERS": (
        f"{BATCHING}::test_as_many_texts_are_tokenised_at_once_as_there_are_preprocessor_workers"
    ),
    "SIE_IMAGE_WORKERS": (
        "tests/unit/test_media_pool.py::test_as_many_images_are_prepared_at_once_as_there_are_image_workers"
    ),
    "SIE_ATTENTION_BACKEND": f"{ADAPTER}::test_the_attention_backend_reaches_what_models_are_loaded_with",
    "SIE_MAX_LORAS_PER_MODEL": f"{ADAPTER}::test_so_many_loras_are_kept_for_a_model_and_the_least_recently_used_goes",
    "SIE_INSTRUMENTATION": (
        f"{ADAPTER}::test_the_last_batches_are_described_and_bounded_and_nothing_is_without_the_setting"
    ),
    "SIE_DEFAULT_COMPUTE_PRECISION": f"{ADAPTER}::test_the_default_precision_holds_for_models_without_their_own",
}

for _of_extra in of_extras.modules("settings"):
    EFFECTS |= _of_extra.EFFECTS

# (setting, component): its value is only checked there, against that of another setting, when the process starts
CHECKED_ONLY = {("SIE_HEARTBEAT_TIMEOUT_MS", "sidecar")}

# files that may read or write the environment or the home folder, each with its reason
READS_ENVIRON = {
    "adapter/sie_adapter/engine/device.py": "CUDA_VISIBLE_DEVICES: hides the GPUs of other adapters from all libraries",
    "core/contracts/sie_contracts/settings/__init__.py": "the one reader",
    "core/contracts/sie_contracts/client_environment.py": "SIE_BASE_URL and SIE_API_KEY, which no server reads",
    "cli/sie_cli/entry.py": "HTTP_PROXY and the like, to which it adds addresses that need no proxy; HOME and USER",
    "cli/sie_cli/home.py": "TMPDIR, where the home of a user without one would be",
    "cli/sie_cli/serve/command.py": "hands its whole environment on to the processes that it starts",
    "adapter/sie_adapter/process.py": "TMPDIR, where a folder is named that cannot be written to",
    "adapter/sie_adapter/loading/precision.py": "ONEDNN_MAX_CPU_ISA, which excludes instructions that torch would use",
    "core/runtime/sie_runtime/tracing.py": "OTEL_*, which OpenTelemetry's SDK reads by itself",
    "cli/sie_cli/data_dir.py": "XDG_DATA_HOME, the user's folder for data of all programs",
}
ENVIRON_CHANGES = {"update", "setdefault", "pop", "popitem", "clear", "__setitem__", "__delitem__"}
WRITES_ENVIRON = {
    "adapter/sie_adapter/engine/device.py": "CUDA_VISIBLE_DEVICES: hides the GPUs of other adapters from all libraries",
    "adapter/sie_adapter/engine/engine.py": (
        "ORT_DISABLE_TELEMETRY and the sizes of oneDNN's caches: nothing else keeps onnxruntime from reporting as it is"
        " imported, and bounds the memory of products that were met"
    ),
    "adapter/sie_adapter/process.py": (
        "TORCHINDUCTOR_CACHE_DIR: nothing else keeps torch from making a folder as it is imported"
    ),
    "core/runtime/sie_runtime/tracing.py": "takes out OTEL_* that are empty, which OpenTelemetry's SDK refuses",
}
READS_HOME = {
    "core/contracts/sie_contracts/settings/__init__.py": "~ in SIE_LOCAL_CACHE and HF_HOME",
    "core/contracts/sie_contracts/settings/values.py": "refuses ~ of a user who does not exist, in any setting",
    "core/store/sie_store/weights/sources.py": "~ in the path of a catalogue entry",
    "adapter/sie_adapter/loading/dependencies.py": "~ in SIE_MODELS_DIR",
    "config_service/sie_config_service/overlay.py": "~ in SIE_MODELS_DIR",
    "core/store/sie_store/models_folder.py": "~ in SIE_MODELS_DIR and SIE_MODEL_PATHS",
    "core/contracts/sie_contracts/models/trust.py": "~ in SIE_MODELS_DIR, SIE_MODEL_PATHS and the paths of an entry",
    "cli/sie_cli/data_dir.py": "the default data directory",
    "cli/sie_cli/models/add.py": "~ in a folder that is named on the command line",
    "cli/sie_cli/models/lookup.py": "~ in SIE_MODELS_DIR, in the folder that a command names and in that of an entry",
    "cli/sie_cli/models/inspect.py": "~ in a folder that is named on the command line",
    "cli/sie_cli/models/weights.py": "~ in a folder that is named on the command line",
}

# the same files of extras
OF_EXTRAS = measure.OF_EXTRAS.get("reads", {"environ": {}, "home": {}})

ENVIRON_READS = {"environ", "environb", "getenv", "getenvb"}
ENVIRON_WRITES = {"putenv", "unsetenv"}
HOME_READS = {"expanduser", "expandvars", "home"}


def trees(folder: str) -> Iterator[tuple[str, ast.Module]]:
    for module in measure.modules(folder):
        yield str(module.file.relative_to(ROOT)), module.tree


def all_trees() -> Iterator[tuple[str, ast.Module]]:
    for folder in measure.PACKAGES:
        yield from trees(folder)


def names_used(tree: ast.AST) -> set[str]:
    """Return the attributes and the imported names in a tree."""
    used: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            used.add(node.attr)
        elif isinstance(node, ast.alias):
            used.add(node.name)
    return used


def test_nothing_but_the_settings_reads_the_environment() -> None:
    """Every exception is listed by file, with the reason, and is used."""
    reads = {file for file, tree in all_trees() for node in ast.walk(tree) if _is_os(node, ENVIRON_READS)}
    assert reads == {*READS_ENVIRON, *OF_EXTRAS["environ"]}
    assert {file for file, tree in all_trees() if names_used(tree) & HOME_READS} == {*READS_HOME, *OF_EXTRAS["home"]}


def test_nothing_writes_the_environment() -> None:
    """Every exception is listed by file, with the reason, and is used."""
    assert {file for file, tree in all_trees() if any(writes_environ(node) for node in ast.walk(tree))} == set(
        WRITES_ENVIRON
    )


def writes_environ(node: ast.AST) -> bool:
    if _is_os(node, ENVIRON_WRITES):
        return True
    is_changed = isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del)
    if is_changed or (isinstance(node, ast.Attribute) and node.attr in ENVIRON_CHANGES):
        return _is_os(node, ENVIRON_READS) or _is_os(node.value, ENVIRON_READS)
    return False


def _is_os(node: ast.AST, names: set[str]) -> bool:
    """Return True for `os.<name>`, and for an import of such a name from os."""
    if isinstance(node, ast.ImportFrom):
        return node.module == "os" and any(alias.name in names for alias in node.names)
    return (
        isinstance(node, ast.Attribute)
        and node.attr in names
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
    )


@functools.cache
def fields_by_attribute() -> dict[str, frozenset[str]]:
    """Return the fields behind each attribute of Settings: a field itself, or the fields that a property reads."""
    fields_by_name = {row.field: frozenset({row.field}) for row in ROWS}
    tree = ast.parse(Path(settings.__file__).read_text("utf-8"))
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "CoreSettings")
    for node in body:
        if isinstance(node, ast.FunctionDef) and any(
            isinstance(decorator, ast.Name) and decorator.id == "property" for decorator in node.decorator_list
        ):
            used = {
                child.attr
                for child in ast.walk(node)
                if isinstance(child, ast.Attribute) and child.attr in fields_by_name
            }
            fields_by_name[node.name] = frozenset(used)
    return fields_by_name


def fields_read(tree: ast.AST) -> set[str]:
    """Return the fields that are read as attributes of a name `settings` or `_settings`."""
    field_sets = fields_by_attribute()
    read: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr in field_sets:
            place = node.value
            if isinstance(place, ast.Call) and isinstance(place.func, ast.Name) and place.func.id == "cast":
                place = place.args[1]
            owner = place.id if isinstance(place, ast.Name) else getattr(place, "attr", "")
            if owner in ("settings", "_settings"):
                read |= field_sets[node.attr]
    return read


def _is_of_command(tree: ast.Module) -> bool:
    """Return whether a module imports the command line, which no other process does."""
    return any(isinstance(node, ast.ImportFrom) and str(node.module).startswith("sie_cli") for node in ast.walk(tree))


@functools.cache
def readers() -> dict[str, frozenset[str]]:
    """Return the components that read each field: in their package, in those of the extras that they load, in a module
    of the store that they import, or in the command that starts their process.
    """
    field_components: dict[str, set[str]] = defaultdict(set)
    commands = {
        node.name: node
        for file, tree in trees("cli")
        if file.endswith("/main.py")
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name in COMPONENTS
    }
    assert set(commands) == set(COMPONENTS)
    for component in COMPONENTS:
        folder = next(folder for folder in measure.PACKAGES if folder.partition("_")[0] == component)
        beside = [measure.FOLDERS[package] for package in distribution.LOADED_BY.get(component, ())]
        loaded = [tree for place in beside for _, tree in trees(place) if not _is_of_command(tree)]
        own = [commands[component], *(tree for _, tree in trees(folder)), *loaded]
        imported = {node.module for tree in own for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        stores = [tree for file, tree in trees("core/store") if f"sie_store.{Path(file).stem}" in imported]
        for tree in own + stores:
            for field in fields_read(tree):
                field_components[field].add(component)
    return {field: frozenset(components) for field, components in field_components.items()}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_setting_is_read_where_its_row_says_and_nowhere_else(row: SettingRow) -> None:
    expected = {component for component in row.components if (row.name, component) not in CHECKED_ONLY}
    assert readers().get(row.field, frozenset()) == expected


def test_what_is_only_checked_is_checked() -> None:
    tree = ast.parse(Path(settings.__file__).read_text("utf-8"))
    (check,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "_cross_check")
    assert {BY_NAME[name].field for name, _ in CHECKED_ONLY} <= fields_read(check)


def test_every_setting_has_a_test_of_its_effect() -> None:
    assert EFFECTS.keys() == BY_NAME.keys()


@pytest.mark.parametrize("name", EFFECTS)
def test_the_test_of_an_effect_exists_and_names_the_setting(name: str) -> None:
    file, _, function = EFFECTS[name].partition("::")
    tree = ast.parse((ROOT / file).read_text("utf-8"))
    (definition,) = (
        node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function
    )
    assert name in ast.unparse(definition) + (ast.get_docstring(tree) or "")
