"""A parser for sie_models_readers.documents.parser_worker, for which the text of a document is a command."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from sie_contracts.media.media import fault
from sie_models_readers.documents import parser_worker
from sie_models_readers.documents.parser_frames import Parsed, ParseJob


class FakeParser:
    kept = b""

    def parse(self, job: ParseJob) -> Parsed:
        text = job.document.data.decode()
        match text.split():
            case ["signal", number]:
                os.kill(os.getpid(), int(number))
                signal.pause()
            case ["sleep", seconds]:
                time.sleep(float(seconds))
            case ["meet", folder]:
                (Path(folder) / str(os.getpid())).touch()
                while len(os.listdir(folder)) < 2:
                    time.sleep(0.01)
            case ["refuse"]:
                raise fault("undecodable", "the document is damaged") from ValueError("of a library")
            case ["allocate", size]:
                try:
                    bytearray(int(size))
                except MemoryError as error:
                    raise fault("too_large", "it takes more memory than its process has") from error
            case ["keep", size]:
                self.kept = b"x" * int(size)
            case ["answer", number]:
                job = ParseJob(int(number), job.document)
            case ["long", size]:
                text = "x" * int(size)
            case ["environment"]:
                text = json.dumps([os.getpid(), dict(os.environ)])
            case ["exit"]:
                os._exit(3)
        tree = b'{"name": "fake"}' if job.has_tree else b""
        return Parsed(job.number, job.document.format or "md", text, text, tree, 1, True, ((0, 1),))


if __name__ == "__main__":
    parser_worker.serve(lambda: FakeParser().parse)
