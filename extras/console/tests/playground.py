"""Steps of a person in the playground of the console: input, reading, and running its programs."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from browser import HOST, Page, click, typed
from typescript_package import compiled, ran

KEY = "a-key-that-no-code-shows"
ANSWER_S = 60.0  # the first request for a model loads it
# the texts of the cells of a table
CELLS = "[...document.querySelectorAll('{0} tr')].map(row => [...row.cells].map(cell => cell.innerText.trim()))"
COPIED = "document.addEventListener('copy', () => { window.copied = document.activeElement.value; })"


def pick(page: Page, picker: str, model: str) -> None:
    """Choose a model in a picker. An empty name chooses no model."""
    if page.evaluate(f"document.querySelector('#{picker}').value") == model:
        return
    click(page, f"#{picker}")
    search = f"#{picker} ~ .popover [role=combobox]"
    page.wait(f"Boolean(document.querySelector('{search}'))", bool)
    typed(page, search, model)
    option = f'#{picker} ~ .popover [data-model="{model}"]'
    page.wait(f"Boolean(document.querySelector('{option}'))", bool)
    click(page, option)
    page.wait(f"document.querySelector('#{picker}').value", lambda name: name == model)


def choose(page: Page, verb: str, model: str, beside: str = "") -> None:
    click(page, f"[name=verb][value={verb}]")
    page.wait("document.querySelector('.card.on input').value", lambda name: name == verb)
    pick(page, "model", model)
    pick(page, "beside", beside)


def files(*attachments: tuple[str, str, bytes]) -> str:
    """Return JavaScript for a DataTransfer with files, each given by name, type and content."""
    listed = json.dumps([(name, kind, base64.b64encode(data).decode()) for name, kind, data in attachments])
    return (
        f"(() => {{ const transfer = new DataTransfer(); for (const [name, type, text] of {listed}) "
        "transfer.items.add(new File([Uint8Array.from(atob(text), element => element.charCodeAt(0))], name, {type})); "
        "return transfer; })()"
    )


def ask(page: Page, results: int = 1) -> None:
    """Run the request, and wait for as many new results."""
    page.wait("document.querySelector('#run').disabled", lambda disabled: not disabled)
    page.evaluate(  # in one call, because the page may run by itself in between
        "document.querySelectorAll('.beside article').forEach(element => { element.dataset.old = 1; }), "
        "document.querySelector('#run').click()"
    )
    fresh = "document.querySelectorAll('.beside article:not([data-old])').length"
    page.wait(fresh, lambda count: count >= results, timeout_s=ANSWER_S)


def copied(page: Page, kind: str, place: int = 0) -> str:
    """Return the text that the button copies, with an address that a process of this machine can reach."""
    page.evaluate("window.copied = undefined")
    page.evaluate(f"document.querySelectorAll('[data-copies={kind}]')[{place}].click()")
    code: str = page.wait("window.copied ?? ''", bool)
    return code.replace(f"//{HOST}:", "//127.0.0.1:")


def by_curl(page: Page, place: int = 0) -> dict[str, Any]:
    """Run the copied curl command and return its answer."""
    environ = {**os.environ, "SIE_API_KEY": KEY}
    argv = ["bash", "-c", copied(page, "curl", place)]
    ran = subprocess.run(argv, capture_output=True, check=True, timeout=60, env=environ)
    answer: dict[str, Any] = json.loads(ran.stdout)
    return answer


def by_python(page: Page, shown: str, place: int = 0) -> Any:
    """Return the JSON of the expression `shown` of the `results` of the copied program."""
    program = f"{copied(page, 'Python', place)}\nimport json\nprint('told', json.dumps({shown}))\n"
    environ = {**os.environ, "SIE_API_KEY": KEY}
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, env=environ)
    assert ran.returncode == 0, ran.stderr.decode()
    return json.loads(ran.stdout.decode().rpartition("told ")[2])


def by_typescript(page: Page, package: Path, shown: str, place: int = 0) -> Any:
    """Return the JSON of the expression `shown` of the `results` of the copied program. It is compiled as strictly as
    the client is.
    """
    program = f"{copied(page, 'TypeScript', place)}\nconsole.log('told', JSON.stringify({shown}));\n"
    (package / "test" / "copied.ts").write_text(program, "utf-8")
    compiled(package)
    return json.loads(ran(["node", "build/test/copied.js"], package, SIE_API_KEY=KEY).rpartition("told ")[2])
