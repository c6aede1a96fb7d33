"""Stands for `python -m sglang.launch_server`, with transformers for what SGLang computes: the options, the routes and
the bodies are those of sglang 0.5.23. The long tests run the real one.

A file `dies` in the model's folder ends it when a batch has the id that the file names; `refuses` ends it at its start;
`wrong` makes its vectors those of other texts. Each start adds its pid and that of its child to `starts`.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import AutoModel


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    folder: ClassVar[Path]
    model: ClassVar[Any]
    context: ClassVar[int]

    def do_GET(self) -> None:
        self._answer(200 if self.path == "/ready" else 404, {})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        texts = asked["input"]
        if self.path != "/v1/embeddings" or asked.get("encoding_format") != "base64":
            self._answer(404, {})
            return
        if any(len(ids) >= self.context for ids in texts):
            self._answer(400, {"error": {"message": "longer than the context"}})
            return
        if not all(texts) or self._dies(texts):
            os._exit(3)
        with torch.inference_mode():
            states = [self.model(input_ids=torch.tensor([ids]))[0][0, -1].float() for ids in texts]
        rows = torch.nn.functional.normalize(torch.stack(states)).roll(int((self.folder / "wrong").exists()), 1)
        found = [
            {"object": "embedding", "index": index, "embedding": base64.b64encode(row.numpy().tobytes()).decode()}
            for index, row in enumerate(rows)
        ]
        self._answer(200, {"object": "list", "data": found, "model": "model", "usage": {}})

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
    child = subprocess.Popen(["sleep", "600"])  # as the real one has children, of its session
    with (Handler.folder / "starts").open("a") as starts:
        starts.write(f"{os.getpid()} {child.pid}\n")
    dtype = getattr(torch, options.dtype)
    Handler.model = AutoModel.from_pretrained(Handler.folder, dtype=dtype).eval()
    ThreadingHTTPServer((options.host, options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
