"""The pod of `sie mcp` in the Helm chart."""

from __future__ import annotations

from helm import container, rendered, variables, workloads

from sie_cli import main as cli


def test_the_tools_for_agents_are_one_pod_of_the_gateways_image_with_its_address() -> None:
    manifests = rendered("everything.yaml")
    entry = container(manifests, "sie-mcp", "mcp")
    assert entry["image"] == container(manifests, "sie-gateway", "gateway")["image"]
    assert workloads(manifests)["sie-mcp"]["spec"]["replicas"] == 1
    group, name = entry["command"]
    assert (group, name) == ("sie", "mcp")
    with cli.main.commands[name].make_context(name, list(entry["args"])) as context:
        assert (context.params["is_http"], context.params["port"]) == (True, entry["ports"][0]["containerPort"])
        assert context.params["lame_duck_s"] > 0
        (mount,) = (mount for mount in entry["volumeMounts"] if mount["name"] == "config")
        assert str(context.params["config_file"]) == f"{mount['mountPath']}/mcp.yaml"
    own = variables(entry)
    assert own["SIE_GATEWAY_URL"] == "http://sie-gateway:8080"
    assert own["SIE_ALLOWED_HOSTS"] == variables(container(manifests, "sie-gateway", "gateway"))["SIE_ALLOWED_HOSTS"]
    # every caller would use a key of this pod
    assert not {"SIE_API_KEY", "SIE_AUTH_TOKEN", "SIE_AUTH_TOKENS", "SIE_ADMIN_TOKEN"} & own.keys()
    assert "sie-mcp" not in workloads(rendered("values.yaml"))
