"""`sie try` against a real cluster: each verb, images, refusals, a pipe and a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import subprocess
from pathlib import Path

import numpy as np
import oracle
import pytest
import shared
from click.testing import CliRunner, Result
from cluster import MODEL, SIE, Cluster
from image_files import encoded, picture

from sie_cli.main import main

pytestmark = shared.OPEN
TEXTS = ["a cat", "a kitten", "a tax form"]


def tried(cluster: Cluster, *args: str, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(main, ["try", *args, "--url", cluster.url], input=stdin)


def answered(cluster: Cluster, *args: str, stdin: bytes | None = None) -> str:
    """Return the output, without blanks at the ends of lines."""
    result = tried(cluster, *args, stdin=stdin)
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.stdout
    return "\n".join(line.rstrip() for line in result.stdout.splitlines())


def test_vectors_have_the_cosines_of_the_public_library(open_cluster: Cluster) -> None:
    text = answered(open_cluster, MODEL, *TEXTS)
    vectors = oracle.encode(TEXTS)
    assert f"{MODEL}  encode\n\ndense: 384 numbers, float32\n" in text
    rows = [line.split() for line in text.partition("cosine of each pair\n")[2].splitlines()[1:4]]
    cosines = np.array([[float(cell) for cell in row[1:]] for row in rows])
    assert np.abs(cosines - np.asarray(vectors) @ np.asarray(vectors).T).max() < 2e-3
    assert re.search(r"^[\d.]+ m?s in total: [\d.]+ m?s queue, [\d.]+ m?s inference, .* other; 13 tokens$", text, re.M)
    assert "loaded for this request" not in text


def test_all_outputs_of_a_model_are_shown(open_cluster: Cluster) -> None:
    text = answered(open_cluster, "test/m3", "hello world", "--explain")
    assert "dense: 32 numbers" in text
    assert "sparse: weights of 72 words" in text
    assert re.search(r"^\S+ +\d+\.\d+  █{24}$", text, re.M), "the largest weight is first"
    assert re.search(r"^1 +\d+ x 32 +hello world$", text, re.M)
    assert re.search(r"^queue +[\d.]+", text, re.M)
    assert "lane _default.cpu.default" in text


def test_documents_are_ranked_as_the_api_ranks_them(open_cluster: Cluster) -> None:
    args = ("test/cross", "--query", "river search", "queue", "river search", "kernel")
    scores = json.loads(answered(open_cluster, *args, "--json"))["scores"]
    text = answered(open_cluster, *args)
    shown = re.findall(r"^ +(\d)  (\d\.\d{4})  █*[▏▎▍▌▋▊▉]? +(\d)  (.+)$", text, re.M)
    assert [(int(rank) - 1, score, f"item-{int(place) - 1}") for rank, score, place, _ in shown] == [
        (entry["rank"], f"{entry['score']:.4f}", entry["item_id"]) for entry in scores
    ]
    assert {name for *_, name in shown} == set(args[3:])


def test_what_is_found_stands_where_it_is_in_the_text(open_cluster: Cluster) -> None:
    text = "Zürich, 東京 and 😀"
    args = ("test/tags", text)
    entities = json.loads(answered(open_cluster, *args, "--json"))["items"][0]["entities"]
    assert entities
    assert all(text[mention["start"] : mention["end"]] == mention["text"] for mention in entities)
    shown = answered(open_cluster, *args)
    for entity in entities:
        assert re.search(
            rf"{entity['label']} .* {entity['score']:.3f}  {entity['start']} to {entity['end']}$", shown, re.M
        )


def test_classes_are_shown_as_bars(open_cluster: Cluster) -> None:
    text = answered(open_cluster, "test/classes", "I am calm")
    assert text.count("█") > 10
    assert {"calm", "anger", "joy"} <= set(text.split())


def test_an_image_for_a_model_of_texts_is_refused(open_cluster: Cluster, tmp_path: Path) -> None:
    image = tmp_path / "red.png"
    image.write_bytes(encoded(picture()))
    refused = tried(open_cluster, "test/mini", f"@{image}")
    assert (refused.exit_code, "test/mini takes text, not image" in refused.output) == (1, True), refused.output


def test_standard_input_is_one_text(open_cluster: Cluster) -> None:
    text = "two\nlines"
    reply = json.loads(answered(open_cluster, MODEL, "-", "--json", stdin=f"{text}\n".encode()))
    assert len(reply["items"]) == 1
    assert np.abs(np.array(reply["items"][0]["dense"]["values"]) - oracle.encode([text])[0]).max() < 1e-3


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("test/min", "a"), "did you mean test/mini"),
        (("test/cross", "a"), 'give the query with --query "a question"'),
        (("test/zero-shot", "a"), "name them with --labels a,b"),
        (("test/mini", "--query", "q", "a"), "test/mini does encode"),
        (("test/mini", " "), "text 1 is empty"),
        (("test/mini",), "nothing to try"),
        (("test/zero-shot", "-l", " , ", "a"), "--labels is empty"),
    ],
)
def test_what_cannot_be_answered_says_what_to_do(open_cluster: Cluster, args: tuple[str, ...], why: str) -> None:
    result = tried(open_cluster, *args)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert why in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_pipe_that_closes_ends_it_without_a_traceback(open_cluster: Cluster) -> None:
    command = f"{SIE} try test/mini {' '.join(map(str, range(300)))} --json --url {open_cluster.url} | head -1"
    completed = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert (completed.stdout, completed.stderr) == ("{\n", "")


@pytest.mark.parametrize("no_color", [False, True])
def test_a_terminal_has_colours_where_they_are_wanted(open_cluster: Cluster, no_color: bool) -> None:
    environ = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
    environ |= {"TERM": "xterm-256color", **({"NO_COLOR": "1"} if no_color else {})}
    parent, child = pty.openpty()
    with contextlib.closing(os.fdopen(parent, "rb", buffering=0)) as screen:
        args = [SIE, "try", "test/tags", "Zürich, 東京 and 😀", "--url", open_cluster.url]
        process = subprocess.Popen(args, stdin=child, stdout=child, stderr=child, env=environ)
        os.close(child)
        output = b""
        with contextlib.suppress(OSError):  # EIO: the other side has ended
            while data := screen.read(65536):
                output += data
        assert process.wait(60) == 0, output
    assert (b"[and]" in output, re.search(rb"\x1b\[[\d;]*4\dm", output) is None) == (no_color, no_color), output


@shared.GUARDED
def test_a_token_is_found_as_other_commands_find_it(guarded_cluster: Cluster) -> None:
    result = CliRunner().invoke(main, ["try", "test/mini", "a", "--data-dir", str(guarded_cluster.data_dir)])
    assert result.exit_code == 0, result.output
    refused = tried(guarded_cluster, "test/mini", "a")
    assert refused.exit_code == 2
    assert "set SIE_API_KEY to a token with the scopes read and infer" in refused.stderr


@pytest.mark.parametrize(
    "command",
    [("try", "test/mini", "a"), ("models", "list"), ("status",)],
    ids=" ".join,
)
def test_commands_reach_a_server_of_this_machine_without_a_proxy(
    open_cluster: Cluster, command: tuple[str, ...]
) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environ |= dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), "http://127.0.0.1:9")
    argv = [SIE, *command, "--data-dir", str(open_cluster.data_dir)]
    result = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
