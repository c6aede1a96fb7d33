"""Debian's headless chromium, driven by the DevTools protocol. It can reach only this machine, which it knows as
HOST.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from cluster import until
from websockets.sync.client import ClientConnection, connect

HOST = "sie.example"  # no loopback name, because on a loopback name libraries of pages skip some requests
_RESOLVER = f"MAP {HOST} 127.0.0.1, MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"


class Navigated(AssertionError):
    """Raised if the page was left during an evaluation."""


class Page:
    """One tab. `asked` has every address that it requested, `complaints` the errors and warnings of its console."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._sent = 0
        self.asked: list[str] = []
        self.complaints: list[str] = []
        for domain in ("Network", "Runtime", "Log", "Page"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)  # only a page that has the focus may copy

    def open(self, url: str) -> None:
        answer = self.call("Page.navigate", url=url)
        assert "errorText" not in answer, answer

    def look(self, width: int, scheme: str = "light") -> None:
        """Set the width and the colour scheme of the page."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def evaluate(self, code: str) -> Any:
        """Evaluate a JavaScript expression as if after an action of the user, and return its JSON value. Raise
        AssertionError if it throws.
        """
        answer = self.call("Runtime.evaluate", expression=code, returnByValue=True, userGesture=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, code: str, good: Callable[[Any], object], timeout_s: float = 40.0) -> Any:
        """Return the value of an expression once it is good. Raise AssertionError with its last value at the
        time-out.
        """
        last: list[Any] = [None]

        def is_good() -> bool:
            try:
                last[0] = self.evaluate(code)
            except Navigated:
                return False  # the next evaluation is of the next page
            return bool(good(last[0]))

        try:
            until(is_good, timeout_s, code)
        except AssertionError as error:
            page = self.evaluate("document.body?.innerText ?? ''")
            raise AssertionError(f"{error}; last: {last[0]}; complaints: {self.complaints}; page:\n{page}") from None
        return last[0]

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result. Raise AssertionError if it fails."""
        self._sent += 1
        self._socket.send(json.dumps({"id": self._sent, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(20))
            if message.get("id") == self._sent:
                if "navigated" in message.get("error", {}).get("message", ""):
                    raise Navigated(message)
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._note(message["method"], message["params"])

    def _note(self, event: str, params: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])
        elif event == "Network.webSocketCreated":
            self.asked.append(params["url"])
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(params["args"]))
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")


def typed(page: Page, element: str, text: str) -> None:
    """Put a text into a field, as a person who pastes it does."""
    page.evaluate(
        f"(() => {{ const field = document.querySelector({json.dumps(element)}); "
        "Object.getOwnPropertyDescriptor(Object.getPrototypeOf(field), 'value').set.call(field, "
        f"{json.dumps(text)}); field.dispatchEvent(new Event('input', {{bubbles: true}})); "
        "field.dispatchEvent(new Event('change', {bubbles: true})); })()"
    )


def click(page: Page, element: str) -> None:
    page.evaluate(f"document.querySelector({json.dumps(element)}).click()")


def pressed(page: Page, key: str, code: int) -> None:
    """Press a key on the element that has the focus."""
    text = {"text": "\r"} if key == "Enter" else {}
    for kind in ("keyDown", "keyUp"):
        extras = text if kind == "keyDown" else {}
        page.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **extras)


@contextlib.contextmanager
def browsing(profile: Path) -> Iterator[str]:
    """Start a browser with its files in `profile`. Yield host and port of its DevTools."""
    argv = [
        "chromium",
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "about:blank",
        "--remote-debugging-port=0",
        f"--user-data-dir={profile}",
        f"--host-resolver-rules={_RESOLVER}",
        "--window-size=1280,900",
    ]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as browser:
        try:
            yield f"127.0.0.1:{until(lambda: _port(profile / 'DevToolsActivePort'), 60, 'a browser')}"
        finally:
            browser.terminate()
            browser.wait(60)


def _port(path: Path) -> str:
    return path.read_text().partition("\n")[0] if path.exists() else ""


@contextlib.contextmanager
def tab(devtools: str) -> Iterator[Page]:
    """Open a new tab, and close it at the end."""
    target = httpx.put(f"http://{devtools}/json/new?about:blank", timeout=60).json()
    with connect(target["webSocketDebuggerUrl"], proxy=None, max_size=64 << 20) as socket:
        yield Page(socket)
        httpx.get(f"http://{devtools}/json/close/{target['id']}", timeout=60)
