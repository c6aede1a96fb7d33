"""Every public method of the public SDK's two clients, called once against a server.

sdk_methods.py URL ──► one line for each method with its outcome, or a traceback
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from sie_sdk import RequestError, SIEAsyncClient, SIEClient

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
NAMESPACES = ("batches", "connections", "files", "jobs")
LINE = {"method": "POST", "url": "/v1/embeddings", "body": {"model": MODEL, "input": "x"}}
# so many lines that the batch has not ended when it is cancelled
BATCH = b"".join(json.dumps({"custom_id": f"{number}", **LINE}).encode() + b"\n" for number in range(1000))
CHAT = [{"role": "user", "content": "x"}]
NO_GENERATION, NO_PATH = "this server does not generate text", "no such path"
Call = Callable[[Any, dict[str, str]], Any]

# the order of the calls, in which each may use ids from earlier ones
CALLS: dict[str, Call] = {
    "encode": lambda client, ids: client.encode(MODEL, {"text": "x"}),
    "score": lambda client, ids: client.score("test/cross", {"text": "x"}, [{"text": "a"}, {"text": "b"}]),
    "extract": lambda client, ids: client.extract("test/zero-shot", {"text": "Ada lived"}, labels=["person"]),
    "list_models": lambda client, ids: client.list_models(),
    "get_model": lambda client, ids: client.get_model(MODEL),
    "get_capacity": lambda client, ids: client.get_capacity(),
    "wait_for_capacity": lambda client, ids: client.wait_for_capacity("cpu", timeout_s=10),
    "watch": lambda client, ids: client.watch(),
    "create_pool": lambda client, ids: client.create_pool("eval", {"cpu": 1}),
    "get_pool": lambda client, ids: client.get_pool("eval"),
    "delete_pool": lambda client, ids: client.delete_pool("eval"),
    "files.upload": lambda client, ids: client.files.upload(BATCH, filename="a.jsonl"),
    "files.create": lambda client, ids: client.files.create(file=BATCH),
    "files.list": lambda client, ids: client.files.list(),
    "files.list_page": lambda client, ids: client.files.list_page(limit=1, order="asc", purpose="batch"),
    "files.retrieve": lambda client, ids: client.files.retrieve(ids["files.upload"]),
    "files.content": lambda client, ids: client.files.content(ids["files.upload"]),
    "batches.create": lambda client, ids: client.batches.create(input_file_id=ids["files.upload"]),
    "batches.retrieve": lambda client, ids: client.batches.retrieve(ids["batches.create"]),
    "batches.list": lambda client, ids: client.batches.list(),
    "batches.list_page": lambda client, ids: client.batches.list_page(limit=1),
    "batches.cancel": lambda client, ids: client.batches.cancel(ids["batches.create"]),
    "files.delete": lambda client, ids: client.files.delete(ids["files.create"]),
    "jobs.list": lambda client, ids: client.jobs.list(),
    "jobs.submit": lambda client, ids: client.jobs.submit(source=["a"], model=MODEL),
    "jobs.get": lambda client, ids: client.jobs.get("job-none"),
    "jobs.wait": lambda client, ids: client.jobs.wait("job-none", timeout_s=5),
    "jobs.results": lambda client, ids: client.jobs.results("job-none"),
    "jobs.cancel": lambda client, ids: client.jobs.cancel("job-none"),
    "jobs.execute": lambda client, ids: client.jobs.execute("job-none", 1, "key"),
    "jobs.repair": lambda client, ids: client.jobs.repair("job-none", 1, 1, "key"),
    "connections.add": lambda client, ids: client.connections.add("a", "s3", "secret"),
    "connections.list": lambda client, ids: client.connections.list(),
    "connections.revoke": lambda client, ids: client.connections.revoke("a"),
    "estimate": lambda client, ids: client.estimate(f"/v1/encode/{MODEL}", {"items": [{"text": "x"}]}),
    "recommend": lambda client, ids: client.recommend("embed"),
    "generate": lambda client, ids: client.generate("q", "x", max_new_tokens=3),
    "stream_generate": lambda client, ids: client.stream_generate("q", "x", max_new_tokens=3),
    "responses": lambda client, ids: client.responses("q", "x"),
    "chat_completions": lambda client, ids: client.chat_completions("q", CHAT),
    "stream_chat_completions": lambda client, ids: client.stream_chat_completions("q", CHAT),
    "close": lambda client, ids: client.close(),
}
# methods that this server does not support: the status and a part of the message of the refusal
REFUSED = {
    **dict.fromkeys(("estimate", "recommend", "generate", "stream_generate"), (404, NO_GENERATION)),
    **dict.fromkeys(("responses", "chat_completions", "stream_chat_completions"), (404, NO_GENERATION)),
    **dict.fromkeys(("connections.add", "connections.list", "connections.revoke"), (404, NO_PATH)),
    **dict.fromkeys(("jobs.execute", "jobs.repair"), (404, NO_PATH)),
    **dict.fromkeys(("jobs.get", "jobs.wait", "jobs.results", "jobs.cancel"), (404, "job")),
    "jobs.submit": (400, "a job reads files"),  # jobs of this server have another schema
}


# namespaces of what a server need not have, by the path that it then lacks
OF_EXTRAS = {"/v1/files": ("files", "batches", "jobs")}


def refused(url: str) -> dict[str, tuple[int, str]]:
    """Return REFUSED for the server at `url`: what it does not have is a path that it does not know."""
    with urllib.request.urlopen(f"{url}/openapi.json") as document:
        paths = json.load(document)["paths"]
    absent = {space for path, spaces in OF_EXTRAS.items() if path not in paths for space in spaces}
    return {**REFUSED, **{name: (404, NO_PATH) for name in CALLS if name.partition(".")[0] in absent}}


def public_methods(client: Any) -> set[str]:
    own = {name for name, _ in inspect.getmembers(type(client), callable) if name[0] != "_"}
    spaces = ((space, type(getattr(client, space))) for space in NAMESPACES)
    return own | {
        f"{space}.{name}" for space, kind in spaces for name, _ in inspect.getmembers(kind, callable) if name[0] != "_"
    }


async def outcome(result: Any) -> Any:
    """Return the result of a call, or the first item that it streams."""
    if inspect.isawaitable(result):
        result = await result
    if hasattr(result, "__anext__"):
        try:
            return await anext(result)
        finally:
            await result.aclose()
    return next(result) if hasattr(result, "__next__") else result


async def run(client: Any, refusals: Mapping[str, tuple[int, str]]) -> bool:
    assert public_methods(client) == set(CALLS), public_methods(client) ^ set(CALLS)
    ids: dict[str, str] = defaultdict(lambda: "none")
    wrong = []
    for name, call in CALLS.items():
        expected = refusals.get(name)
        try:
            value = await outcome(call(client, ids))
        except RequestError as error:
            report = f"{error.status_code} {error}"
            is_right = expected is not None and error.status_code == expected[0] and expected[1] in str(error)
        else:
            report, is_right = type(value).__name__, expected is None
            if isinstance(value, dict) and "id" in value:
                ids[name] = value["id"]
        print(f"{'ok' if is_right else 'WRONG'}: {type(client).__name__}.{name}: {report}", flush=True)
        wrong += [] if is_right else [name]
    return not wrong


async def main(url: str) -> int:
    arguments = {"control_plane_url": url, "org": "org", "api_key": "", "timeout_s": 30}
    refusals = refused(url)
    clients = SIEClient(url, **arguments), SIEAsyncClient(url, **arguments)
    return 0 if all([await run(client, refusals) for client in clients]) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1])))
