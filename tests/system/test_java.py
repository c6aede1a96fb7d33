"""The JDK's client with default settings: its first request offers HTTP/2 in clear text, and carries the body."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from stack import Stack

pytestmark = pytest.mark.debian

PROGRAM = """
import java.net.URI;
import java.net.http.*;

public class Post {
    public static void main(String[] arguments) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        for (int at = 1; at < arguments.length; at += 2) {
            HttpRequest request = HttpRequest.newBuilder(URI.create(arguments[0] + arguments[at]))
                .header("Content-Type", "application/json")
                .POST(HttpRequest.BodyPublishers.ofString(arguments[at + 1]))
                .build();
            HttpResponse<String> response = client.send(request, HttpResponse.BodyHandlers.ofString());
            System.out.println(response.statusCode() + " " + response.version() + " " + response.body());
        }
    }
}
"""


def test_the_client_of_the_jdk_is_answered_on_each_route(toy_stack: Stack, tmp_path: Path) -> None:
    program = tmp_path / "Post.java"
    program.write_text(PROGRAM)
    requests = {
        "/v1/embeddings": {"model": "toy/one", "input": ["a", "b"]},
        "/v1/encode/toy/one": {"items": [{"text": "a"}]},
    }
    sent = [text for path, body in requests.items() for text in (path, json.dumps(body))]
    done = subprocess.run(
        ["java", str(program), toy_stack.urls[0], *sent], capture_output=True, text=True, timeout=120, check=True
    )
    answers = done.stdout.splitlines()
    assert [answer[:12] for answer in answers] == ["200 HTTP_1_1"] * len(requests), answers
