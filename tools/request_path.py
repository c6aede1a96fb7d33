"""Counts the product's files that one encode enters, in each process, by tracing real requests.

    python tools/request_path.py             the number of files by process, and of all of them together
    python tools/request_path.py --list      and their names

A broker, a gateway, a sidecar and an adapter run with the model of the package. Each of them records the files of the
Python functions that it enters between two notices, in all threads. A file counts if each of several requests entered
it, so that what else a process does at times (heartbeats, refreshes) does not.
"""

import argparse
import json
import os
import socket
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from measure import PACKAGES
from stack import Plan, Stack

ROOT = Path(__file__).resolve().parents[1]
MAX_FILES = 30
REQUESTS = 8
MODEL = "sentence-transformers/all-MiniLM-L6-v2"

# runs at the start of every Python process that finds its folder on PYTHONPATH
TRACER = """
    import json, os, socket, sys, threading

    folder = os.environ["REQUEST_PATH_FOLDER"]
    active, files = False, set()

    def entered(frame, event, argument):
        if active and event == "call":
            files.add(frame.f_code.co_filename)

    def serve(listener):
        global active
        while True:
            connection, _ = listener.accept()
            with connection:
                word = connection.recv(16)
                active = word == b"begin"
                if active:
                    files.clear()
                connection.sendall(b"{}" if active else json.dumps(sorted(files)).encode())

    def begin():
        listener = socket.socket(socket.AF_UNIX)
        command = [word for word in sys.orig_argv if word in ("gateway", "sidecar", "adapter")]
        listener.bind(os.path.join(folder, f"{command[0] if command else 'other'}.{os.getpid()}"))
        listener.listen()
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        sys.setprofile(entered)
        threading.setprofile(entered)

    begin()
    os.register_at_fork(after_in_child=begin)
"""


def told(address: Path, word: str) -> list[str]:
    """What a process answers; nothing if it has ended."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(address))
        except ConnectionRefusedError:
            return []
        connection.sendall(word.encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    return list(json.loads(answer))


def product_files(files: list[str]) -> Iterator[str]:
    for file in files:
        path = Path(file)
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES:
            yield str(path.relative_to(ROOT))


def traced(folder: Path, url: str) -> dict[str, set[str]]:
    """The files that one request enters, by process."""
    for address in folder.iterdir():
        told(address, "begin")
    body = {"items": ["What is deep learning?"]}
    answer = httpx.post(f"{url}/v1/encode/{MODEL}", json=body, timeout=120, trust_env=False)
    if answer.status_code != 200:
        raise SystemExit(f"the request failed: {answer.status_code} {answer.text[:300]}")
    entered: dict[str, set[str]] = {}
    for address in folder.iterdir():
        entered.setdefault(address.name.partition(".")[0], set()).update(product_files(told(address, "end")))
    return entered


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the files")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, code = Path(name, "s"), Path(name, "code")
        folder.mkdir()
        code.mkdir()
        (code / "sitecustomize.py").write_text(textwrap.dedent(TRACER))
        paths = os.pathsep.join([str(code), *filter(None, [os.environ.get("PYTHONPATH")])])
        plan = Plan(
            models=(), workers=(None,), environ={"PYTHONPATH": paths, "REQUEST_PATH_FOLDER": str(folder)}, preload=False
        )
        with Stack(Path(name, "stack"), plan) as stack:
            rounds = [traced(folder, stack.urls[0]) for _ in range(REQUESTS + 1)][1:]  # the first one loads the model
    roles = ("gateway", "sidecar", "adapter")
    always = {role: set.intersection(*(each.get(role, set()) for each in rounds)) for role in roles}
    for role in roles:
        print(f"{role:<8} {len(always[role]):>4}")
        if options.list:
            print("".join(f"    {file}\n" for file in sorted(always[role])), end="")
    print(f"gateway and sidecar {len(always['gateway'] | always['sidecar'])} (bound {MAX_FILES})")
    print(f"all                 {len(set().union(*always.values()))}")


if __name__ == "__main__":
    main()
