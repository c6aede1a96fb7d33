"""A stand-in for `python -m sglang.launch_server`, with options, routes and bodies of sglang 0.5.23. The long tests run
the real server. `LastStates` in the test's process computes the states, because an import of torch takes seconds.

Files in the model's folder control it: `states` has the address of `LastStates`; `dies` has a token id at which the
server ends; `refuses` ends it at its start; `waits` delays the start while it exists; `wrong` makes its vectors wrong.
Each start adds the pids of the server and its child to the file `starts`.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are sent separately, and Nagle would delay the body up to 40 ms
    folder: ClassVar[Path]
    context: ClassVar[int]

    def do_GET(self) -> None:
        self._answer(200 if self.path == "/ready" else 404, {})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        texts = request["input"]
        if self.path != "/v1/embeddings" or request.get("encoding_format") != "base64":
            self._answer(404, {})
            return
        if any(len(ids) >= self.context for ids in texts):
            self._answer(400, {"error": {"message": "longer than the context"}})
            return
        if not all(texts) or self._dies(texts):
            os._exit(3)
        body = json.dumps(texts).encode()
        with urllib.request.urlopen((self.folder / "states").read_text(), body) as states:
            rows = [base64.b64decode(row) for row in json.load(states)]
        if (self.folder / "wrong").exists():
            rows = [row[-4:] + row[:-4] for row in rows]
        embeddings = [
            {"object": "embedding", "index": index, "embedding": base64.b64encode(row).decode()}
            for index, row in enumerate(rows)
        ]
        self._answer(200, {"object": "list", "data": embeddings, "model": "model", "usage": {}})

    def _dies(self, texts: list[list[int]]) -> bool:
        file = self.folder / "dies"
        return file.exists() and any(int(file.read_text()) in ids for ids in texts)

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class LastStates(ThreadingHTTPServer):
    """A server in this process that answers token ids of texts with the normalised states of their last tokens, by
    transformers. It writes its address to the model's folder.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModel

        super().__init__(("127.0.0.1", 0), _StatesHandler)
        self.model = AutoModel.from_pretrained(folder).eval()
        (folder / "states").write_text(f"http://127.0.0.1:{self.server_port}/")
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _StatesHandler(BaseHTTPRequestHandler):
    server: LastStates

    def do_POST(self) -> None:
        import torch

        texts = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with torch.inference_mode():
            states = [self.server.model(input_ids=torch.tensor([ids]))[0][0, -1].float() for ids in texts]
            rows = torch.nn.functional.normalize(torch.stack(states))
        content = json.dumps([base64.b64encode(row.numpy().tobytes()).decode() for row in rows]).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-m", dest="module", choices=["sglang.launch_server"], required=True)
    for name in ("--model-path", "--device", "--dtype", "--host", "--attention-backend", "--log-level"):
        parser.add_argument(name, required=True)
    for name in ("--port", "--context-length", "--max-total-tokens"):
        parser.add_argument(name, type=int, required=True)
    for name in ("--is-embedding", "--disable-radix-cache", "--skip-tokenizer-init"):
        parser.add_argument(name, action="store_true", required=True)
    options = parser.parse_args()
    Handler.folder, Handler.context = Path(options.model_path), options.context_length
    if (Handler.folder / "refuses").exists():
        sys.exit(1)
    child = subprocess.Popen(["sleep", "600"])  # the real server also has children in its session
    with (Handler.folder / "starts").open("a") as starts:
        starts.write(f"{os.getpid()} {child.pid}\n")
    while (Handler.folder / "waits").exists():
        time.sleep(0.01)
    ThreadingHTTPServer((options.host, options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
