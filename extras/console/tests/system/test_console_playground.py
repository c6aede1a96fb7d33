"""The playground of the console in a real browser: what each view shows is what the API answers, and the code that it
gives to copy is the request that it sent.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import local_models
import numpy as np
import pytest
import shared
import typescript_package
from browser import HOST, Page, click, pressed, tab, typed
from cluster import Cluster, running
from image_files import encoded, picture, turned
from parity import detector_checkpoints, qwen_checkpoints, reader_checkpoints
from playground import (
    CELLS,
    COPIED,
    KEY,
    ask,
    attach,
    bars,
    by_curl,
    by_python,
    by_typescript,
    choose,
    copied,
    files,
    pick,
)

pytestmark = pytest.mark.debian

KINDS = ("mini", "sparse", "late", "m3", "cross", "reranker", "gliner", "classes", "clip", "pages")
PHOTO, OTHER = encoded(picture(120, 60)), encoded(picture(60, 90, seed=3))
HARM = '<img src=x onerror="window.harmed = 1">'


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    models = local_models.under(tmp_path_factory.mktemp("playground-models"))
    for kind in KINDS:
        models.build(kind)
    mini = local_models.KINDS["mini"](models.weights)
    models.add("prompted", {**mini, "prompts": {"document": "passage: {text}"}})
    detector_checkpoints.grounding_dino(models.weights / "dino")
    parameters = {"box_threshold": 0.02, "text_threshold": 0.0}
    entry = {"family": "detector", "inputs": ["image"], "outputs": {"objects": 0}, "max_tokens": 255}
    models.add("dino", {**entry, "run": {"parameters": parameters}})
    reader_checkpoints.donut(models.weights / "donut")
    read = {"family": "document-reader", "inputs": ["image"], "outputs": {"entities": 0, "data": 0}, "max_tokens": 100}
    models.add("donut", {**read, "run": {"parameters": {"task": "<s_cord-v2>"}}})
    qwen_checkpoints.qwen3_vl(models.weights / "ranker")
    ranked = {"family": "multimodal-reranker", "inputs": ["text", "image"], "outputs": {"score": 0}, "max_tokens": 400}
    bounds = {"min_pixels": qwen_checkpoints.MIN_3, "max_pixels": qwen_checkpoints.MAX_3, "precision": "float32"}
    pair = ["Judge whether", "<Query>:{query}\n<Document>:{document}", " the end"]
    head = {"yes_token": "y", "no_token": "n"}
    models.add("ranker", {**ranked, "load": bounds, "pair": pair, "head": head})
    qwen_checkpoints.colqwen(models.weights / "colqwen")
    pages = {"family": "vision-language", "inputs": ["text", "image"], "max_tokens": 200}
    outputs, load = {"multivector": qwen_checkpoints.WIDTH}, {"max_pixels": qwen_checkpoints.MOST}
    models.add("colqwen", {**pages, "outputs": outputs, "load": {**load, "precision": "float32"}})
    with running(
        tmp_path_factory.mktemp("playground"), *models.arguments, "--no-spare", "--allowed-hosts", HOST
    ) as cluster:
        yield cluster


@pytest.fixture
def page(devtools: str, cluster: Cluster) -> Iterator[Page]:
    """The playground. After the test the page has logged no error and asked no other host."""
    own = f"http://{HOST}:{cluster.port}/"
    with tab(devtools) as page:
        page.open(own)
        page.wait("document.querySelector('#model')?.value", bool)
        page.evaluate(COPIED)
        yield page
        assert page.evaluate("window.harmed ?? null") is None
        assert unexpected(page) == []
        assert [url for url in page.asked if not url.startswith((own, "data:"))] == []


def unexpected(page: Page) -> list[str]:
    """Return the errors that the page logged, without those about 503: while a model is loaded, the page repeats its
    request.
    """
    return [complaint for complaint in page.complaints if "status of 503" not in complaint]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built TypeScript client."""
    return typescript_package.copied(tmp_path_factory)


def cosines(vectors: list[list[float]]) -> list[float]:
    rows = np.array(vectors) / np.linalg.norm(vectors, axis=1, keepdims=True)
    products: list[float] = (rows @ rows.T).ravel().tolist()
    return products


HEAT = "[...document.querySelectorAll('.heat td')].map(cell => Number(cell.innerText))"


def test_texts_are_compared_and_their_code_gives_the_same_numbers(page: Page, package: Path) -> None:
    choose(page, "encode", "test/mini")
    typed(page, "#texts", 'a cat\na <b>kitten</b>\nit\'s "stocks" \\ $HOME `id`')
    ask(page)
    shown = page.evaluate(HEAT)
    vectors = [item["dense"]["values"] for item in by_curl(page)["items"]]
    assert shown == pytest.approx(cosines(vectors), abs=0.0051)
    sdk_vectors = by_python(page, '[element["dense"].tolist() for element in results]')
    assert np.abs(np.array(sdk_vectors) - np.array(vectors)).max() < 1e-6
    sdk_vectors = by_typescript(page, package, "results.map((element) => [...element.dense!])")
    assert np.abs(np.array(sdk_vectors) - np.array(vectors)).max() < 1e-6
    assert page.evaluate("document.querySelectorAll('.heat b').length") == 0


def test_a_model_is_chosen_by_the_keyboard_and_has_an_address(page: Page) -> None:
    value = "document.querySelector('#model').value"
    choose(page, "encode", "test/mini")
    page.evaluate("document.querySelector('#model').focus()")
    pressed(page, "Enter", 13)
    page.wait("document.activeElement.role", lambda role: role == "combobox")
    page.call("Input.insertText", text="clip")
    options = "[...document.querySelectorAll('[role=option]')].map(option => option.dataset.model)"
    page.wait(options, lambda names: names == ["test/clip"])
    pressed(page, "Enter", 13)
    page.wait(value, lambda model: model == "test/clip")
    page.wait("document.activeElement.id", lambda name: name == "model")
    assert page.evaluate("location.hash") == "#playground/encode/test/clip"
    pressed(page, "Enter", 13)
    page.wait("document.activeElement.role", lambda role: role == "combobox")
    for _ in range(2):
        pressed(page, "ArrowDown", 40)
    third = page.evaluate(options)[2]
    page.wait("document.querySelector('[data-active]').dataset.model", lambda model: model == third)
    pressed(page, "Escape", 27)
    page.wait("document.querySelectorAll('[role=option]').length", lambda count: count == 0)
    page.evaluate("history.back()")
    page.wait(value, lambda model: model == "test/mini")
    page.call("Page.reload")
    page.wait(f"document.querySelector('#model') && {value}", lambda model: model == "test/mini")


def test_texts_and_images_are_inputs_of_one_request(page: Page) -> None:
    """Images are picked, dropped and pasted. A file that is no image is refused by name."""
    choose(page, "encode", "test/clip")
    typed(page, "#texts", "a cat")
    attach(page, ("picked.png", "image/png", PHOTO))
    page.evaluate(
        f"document.querySelector('#files').closest('.drop').dispatchEvent(new DragEvent('drop', {{bubbles: true, "
        f"cancelable: true, dataTransfer: {files(('<b>dropped</b>.png', 'image/png', OTHER))}}}))"
    )
    page.wait("document.querySelectorAll('.files li').length", lambda count: count == 2)
    page.evaluate(
        "document.querySelector('#texts').dispatchEvent(new ClipboardEvent('paste', {bubbles: true, cancelable: true, "
        f"clipboardData: {files(('pasted.png', 'image/png', PHOTO), ('a.pdf', 'application/pdf', b'%PDF'))}}}))"
    )
    page.wait("document.querySelectorAll('.files li').length", lambda count: count == 3)
    assert "a.pdf" in page.wait("document.querySelector('.drop [role=alert]')?.innerText", bool)
    previews = "[...document.querySelectorAll('.files img')].map(element => [element.complete, element.naturalWidth])"
    page.wait(previews, lambda sizes: sizes == [[True, 120], [True, 60], [True, 120]])
    ask(page)
    sent = by_curl(page)
    vectors = [item["dense"]["values"] for item in sent["items"]]
    assert len(vectors) == 4
    assert vectors[1] == pytest.approx(vectors[3], abs=1e-6)
    assert page.evaluate(HEAT) == pytest.approx(cosines(vectors), abs=0.0051)
    shown = page.evaluate("document.querySelector('.code[data-kind=curl]').textContent")
    assert base64.b64encode(PHOTO).decode() not in shown  # the page shows it shortened
    assert base64.b64encode(PHOTO).decode() in copied(page, "curl")
    sdk_vectors = by_python(page, '[element["dense"].tolist() for element in results]')
    assert np.abs(np.array(sdk_vectors) - np.array(vectors)).max() < 1e-6
    page.evaluate("document.querySelector('[aria-label=\"Remove picked.png\"]').click()")
    page.wait("document.querySelectorAll('.files li').length", lambda count: count == 2)


def test_chunks_of_a_document_are_coloured_by_their_similarity_to_the_query(page: Page) -> None:
    text = (
        "The river ran past mills.\n\nA 👩‍💻 wrote code & <b>tests</b>. The cat slept on the mat. Stocks fell sharply."
    )
    choose(page, "encode", "test/mini")
    typed(page, "#chunks", "12")
    page.wait("Boolean(document.querySelector('#query') && document.querySelector('#context'))", bool)
    typed(page, "#query", "a sleeping cat")
    typed(page, "#texts", text)
    ask(page)
    marks = "[...document.querySelectorAll('.chunks mark')].map(mark => [mark.textContent, mark.title])"
    shown = page.wait(marks, bool)
    assert "".join(own for own, _ in shown) == text
    query = by_curl(page, 0)["items"][0]["dense"]["values"]
    chunks = by_curl(page, 1)["items"][0]["chunks"]
    assert len(chunks) > 2
    assert [own for own, _ in shown] == [text[chunk["start"] : chunk["end"]] for chunk in chunks]
    near = [float(np.dot(query, chunk["dense"]["values"])) for chunk in chunks]
    similarities = [float(title.split()[2].rstrip(",")) for _, title in shown]
    assert similarities == pytest.approx(near, abs=0.0002)
    assert [value for _, value in bars(page)] == pytest.approx(sorted(near, reverse=True), abs=0.0002)
    assert by_python(page, '[len(element["chunks"]) for element in results]', 1) == [len(chunks)]
    page.evaluate("document.querySelector('#chunks').value = ''")
    typed(page, "#chunks", "0")
    page.wait("document.querySelector('#run').disabled", bool)


def test_what_was_cut_is_shown(page: Page) -> None:
    """The model reads 256 tokens, two of which are special, and each word here is one."""
    choose(page, "encode", "test/mini")
    typed(page, "#texts", "word " * 300 + "\nshort")
    ask(page)
    cut = page.wait("document.querySelector('.tokens .cut')?.innerText ?? ''", bool)
    assert cut.split() == ["word"] * 46
    assert page.evaluate("document.querySelectorAll('.tokens .cut').length") == 1


@shared.needs("/tei/test/sparse/decode")
def test_sparse_weights_are_words_and_marks_in_the_text(page: Page, cluster: Cluster) -> None:
    text = "The cat sat <b>there</b>, in Zürich."
    choose(page, "encode", "test/sparse")
    typed(page, "#texts", text)
    ask(page)
    page.wait("document.querySelectorAll('.tokens mark').length", lambda count: count > 2)
    (item,) = by_curl(page)["items"]
    pairs = dict(zip(item["sparse"]["indices"], item["sparse"]["values"], strict=True))
    best = sorted(pairs, key=lambda token: -pairs[token])[:12]
    route = f"{cluster.url}/tei/test/sparse"
    body = {"ids": [[token] for token in best], "skip_special_tokens": False}
    words = httpx.post(f"{route}/decode", json=body, timeout=20).json()
    page.wait(CELLS.format(".bars"), lambda rows: rows[0][0] == words[0].strip())
    shown = bars(page)
    assert [name for name, _ in shown] == [word.strip() for word in words]
    assert [value for _, value in shown] == pytest.approx([pairs[token] for token in best], abs=6e-5)
    (tokens,) = httpx.post(f"{route}/tokenize", json={"inputs": [text]}, timeout=20).json()
    marks = page.evaluate(
        "[...document.querySelectorAll('.tokens mark')].map(element => [Number(element.dataset.id), element.title, "
        "element.classList.contains('special')])"
    )
    assert [mark[0] for mark in marks] == [token["id"] for token in tokens]
    assert [mark[2] for mark in marks] == [token["special"] for token in tokens]
    assert [float(mark[1].rpartition(" ")[2]) for mark in marks] == pytest.approx(
        [pairs.get(token["id"], 0.0) for token in tokens], abs=6e-5
    )
    specials = [token["text"] for token in tokens if token["special"]]
    assert page.evaluate("document.querySelector('.tokens').textContent") == specials[0] + text + specials[1]


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("test/late", ["[CLS]", "[D]", "T", "h", "e", "c", "at"]),
        ("test/m3", ["T", "T", "h", "e", " ", "c", "a", "t"]),
    ],
)
def test_each_token_of_a_query_meets_each_of_a_document(
    page: Page, cluster: Cluster, model: str, names: list[str]
) -> None:
    query, texts = "where is it?", ["The cat, it sat on a mat.", "Rivers run north. <i>x</i>"]
    choose(page, "encode", model)
    if model == "test/m3":
        typed(page, "#output", "multivector")
    page.wait("document.querySelectorAll('#query').length", lambda count: count == 1)
    typed(page, "#query", query)
    typed(page, "#texts", "\n".join(texts))
    ask(page)
    asking, answered = by_curl(page, 0), by_curl(page, 1)
    rows = np.array(asking["items"][0]["multivector"]["values"])
    maps = [rows @ np.array(item["multivector"]["values"]).T for item in answered["items"]]
    sums = [float(grid.max(1).sum()) for grid in maps]
    assert sorted(bars(page), key=lambda bar: texts.index(bar[0])) == [
        (text, pytest.approx(total, abs=6e-5)) for text, total in zip(texts, sums, strict=True)
    ]
    body = {
        "query": {"text": query},
        "items": texts,
        **({"params": {"score_mode": "colbert"}} if "m3" in model else {}),
    }
    scored = httpx.post(f"{cluster.url}/v1/score/{model}", json=body, timeout=60).json()["scores"]
    share = len(rows) if model == "test/m3" else 1  # BGE-M3 takes the mean
    assert {entry["item_id"]: entry["score"] for entry in scored} == {
        f"item-{place}": pytest.approx(total / share, rel=1e-4) for place, total in enumerate(sums)
    }
    typed(page, "select.document", "0")
    head = "[...document.querySelectorAll('.late thead th')].slice(1).map(element => element.title)"
    page.wait(head, lambda titles: titles[: len(names)] == names)
    assert len(page.evaluate(head)) == answered["items"][0]["multivector"]["num_tokens"]
    cells = "[...document.querySelectorAll('.late tbody tr')].map(row => [...row.querySelectorAll('td')].map("
    shown = np.array(page.evaluate(f"{cells}cell => Number(cell.innerText)))"))
    assert np.abs(shown - maps[0]).max() < 0.0051
    best = page.evaluate(f"{cells}cell => cell.classList.contains('best')).indexOf(true))")
    assert best == maps[0].argmax(1).tolist()
    assert page.evaluate("document.querySelectorAll('.late b, .late i').length") == 0


def test_patches_lie_over_the_page_that_they_are_of(page: Page) -> None:
    choose(page, "encode", "test/pages")
    attach(page, ("page.png", "image/png", PHOTO))
    typed(page, "#texts", "")
    typed(page, "#query", "what total")
    ask(page)
    rects = "[...document.querySelectorAll('.patches rect')].map(element => Number(element.textContent))"
    page.wait(rects, lambda values: len(values) == 16)
    rows = np.array(by_curl(page, 0)["items"][0]["multivector"]["values"])
    image = np.array(by_curl(page, 1)["items"][0]["multivector"]["values"])
    products = rows @ image.T
    assert page.evaluate(rects) == pytest.approx(products[:, :16].max(0).tolist(), abs=6e-5)
    typed(page, "select.token", "2")
    page.wait(rects, lambda values: values == pytest.approx(products[2, :16].tolist(), abs=6e-5))
    typed(page, "[data-grid=first]", "16")
    page.wait(rects, lambda values: values == pytest.approx(products[2, 16:].tolist(), abs=6e-5))
    typed(page, "[data-grid=across]", "5")  # more than there are
    page.wait(rects, lambda values: values == [])
    same = (
        "(() => { const [a, b] = ['.picture img', '.patches, .picture'].map(element => document.querySelector(element)"
    )
    box = page.evaluate(f"{same}.getBoundingClientRect()); return [a.width - b.width, a.height - b.height]; }})()")
    assert np.abs(box).max() <= 3


def test_boxes_lie_on_the_upright_picture_in_its_pixels(page: Page, package: Path) -> None:
    choose(page, "extract", "test/dino")
    attach(page, ("turned.png", "image/png", turned(6, picture(60, 100))))
    typed(page, "#labels", "a cat, <b>box</b>")
    typed(page, "#further", '{"threshold": 0.0}')
    assert page.evaluate("document.querySelectorAll('#texts').length") == 0
    ask(page)
    (item,) = by_curl(page)["items"]
    drawn = "[...document.querySelectorAll('.boxes rect')].map(element => ['x', 'y', 'width', 'height'].map(name => "
    shown = page.wait(f"{drawn}Number(element.getAttribute(name))))", bool)
    assert shown == [detection["bbox"] for detection in item["objects"]]
    assert page.evaluate("document.querySelector('.boxes').getAttribute('viewBox')") == "0 0 100 60"
    rows = page.evaluate(CELLS.format(".found tbody"))
    assert [row[0] for row in rows] == [
        f"{place + 1} {detection['label']}" for place, detection in enumerate(item["objects"])
    ]
    assert [float(row[1]) for row in rows] == pytest.approx(
        [detection["score"] for detection in item["objects"]], abs=6e-5
    )
    least = round(item["objects"][5]["score"], 2)
    typed(page, ".least", str(least))
    strong_boxes = [detection["bbox"] for detection in item["objects"] if detection["score"] >= least]
    page.wait(f"{drawn}Number(element.getAttribute(name))))", lambda drawn_boxes: drawn_boxes == strong_boxes)
    boxes = [[detection["bbox"] for detection in item["objects"]]]
    assert by_python(page, '[[one["bbox"] for one in element["objects"]] for element in results]') == boxes
    assert by_typescript(page, package, "results.map((element) => element.objects.map((one) => one.bbox))") == boxes


def test_spans_classes_and_what_a_page_says_are_shown(page: Page, package: Path) -> None:
    choose(page, "extract", "test/gliner")
    text = "Ada Lovelace 🙂 met Charles in London."
    typed(page, "#texts", text)
    typed(page, "#threshold", "0.1")
    ask(page)
    (item,) = by_curl(page)["items"]
    marks = page.evaluate("[...document.querySelectorAll('.spans mark')].map(element => element.firstChild.data)")
    assert marks
    assert set(marks) <= {text[span["start"] : span["end"]] for span in item["entities"]}
    for sdk_entity, entity in zip(by_typescript(page, package, "results[0]!.entities"), item["entities"], strict=True):
        assert sdk_entity == {**entity, "score": pytest.approx(entity["score"], abs=1e-6)}

    typed(page, "#threshold", "")
    typed(page, "#labels", "")
    choose(page, "extract", "test/classes")
    ask(page)
    (item,) = by_curl(page)["items"]
    assert bars(page) == [
        (classification["label"], pytest.approx(classification["score"], abs=6e-5))
        for classification in item["classifications"]
    ]

    choose(page, "extract", "test/donut")
    attach(page, ("receipt.png", "image/png", PHOTO))
    typed(page, "#further", '{"max_new_tokens": 20}')
    ask(page)
    (item,) = by_curl(page)["items"]
    rows = page.evaluate(CELLS.format(".entities tbody"))
    assert [row[:2] for row in rows] == [[part["label"], part["text"].strip()] for part in item["entities"]]
    tree = page.evaluate("document.querySelector('.tree').textContent")
    assert f"completion_tokens: {item['data']['completion_tokens']}" in tree
    assert f"finish_reason: {item['data']['finish_reason']}" in tree


FOUND = {
    "entities": [{"text": HARM, "label": HARM, "score": 0.9, "start": None, "end": None, "bbox": [10, 20, 30, 15]}],
    "relations": [{"head": HARM, "tail": "Bob", "relation": "met", "score": 0.75}],
    "classifications": [{"label": HARM, "score": 0.5}],
    "objects": [{"label": "a cat", "score": 0.25, "bbox": [1, 2, 3, 4]}],
    "data": {"polygons": [[[1, 2, 3, 4, 5, 6]]], HARM: [HARM, 17, None, True], "deep": {"er": {"est": "leaf"}}},
}
FORGED = """(() => { const real = window.fetch; window.fetch = async (...args) => {
  const answer = await real(...args);
  if (!String(args[0]).includes('/v1/extract')) return answer;
  const body = await answer.json();
  Object.assign(body.items[0], FOUND);
  body.warnings = [body.items[0].entities[0].text];
  body.model = body.items[0].entities[0].text;
  return new Response(JSON.stringify(body), {status: 200});
}; })()"""


def test_relations_outlines_and_trees_are_shown_and_markup_does_nothing(page: Page) -> None:
    """The replies are forged: no small model gives such answers."""
    page.evaluate(FORGED.replace("FOUND", json.dumps(FOUND)))
    choose(page, "extract", "test/dino")
    attach(page, (f"{HARM}.png".replace("/", ""), "image/png", PHOTO))
    ask(page)
    page.wait("document.querySelectorAll('.boxes rect').length", lambda count: count == 2)
    assert page.evaluate("document.querySelector('.boxes polygon').getAttribute('points')") == "1 2 3 4 5 6"
    rows = page.evaluate(CELLS.format(".found tbody"))
    assert [row[0] for row in rows] == ["1 a cat", f"2 {HARM}: {HARM}"]
    assert [row[2] for row in rows] == ["1, 2, 3, 4", "10, 20, 30, 15"]
    assert page.evaluate(CELLS.format(".relations tbody")) == [[HARM, "met", "Bob", "0.7500"]]
    assert page.evaluate(CELLS.format(".entities tbody")) == [[HARM, HARM, "0.9000"]]
    assert bars(page) == [(HARM, 0.5)]
    tree = page.evaluate(
        "(() => { for (let turn = 0; turn < 9; turn++) document.querySelectorAll('.tree summary').forEach(element => "
        "{ if (!element.parentElement.open) element.click(); }); return 0; })()"
    )
    tree = page.wait("document.querySelector('.tree').innerText", lambda text: "leaf" in text)
    assert f"0: {HARM}" in tree
    assert "1: 17" in tree
    assert page.evaluate("document.querySelector('article h2').innerText") == HARM
    assert page.evaluate("document.querySelectorAll('article img[src=x]').length") == 0


def test_two_profiles_and_two_rerankers_stand_beside_each_other(page: Page, package: Path) -> None:
    choose(page, "encode", "test/mini")
    click(page, "#beside")
    options = (
        "[...document.querySelectorAll('#beside ~ .popover [role=group]')].map(element => [element.ariaLabel, ...[..."
    )
    options += "element.querySelectorAll('[role=option]')].map(option => option.dataset.model)])"
    groups = page.wait(options, lambda labels: len(labels) > 1)
    assert groups[0] == ["Profiles of test/mini", "test/mini:bf16"]
    click(page, "#beside")
    pick(page, "beside", "test/mini:bf16")
    typed(page, "#texts", "a cat\nstocks")
    ask(page, 3)
    left, right = (np.array([entry["dense"]["values"] for entry in by_curl(page, at)["items"]]) for at in (0, 1))
    values = page.evaluate("[...document.querySelectorAll('.same li')].map(element => parseFloat(element.innerText))")
    expected = (left * right).sum(1) / np.linalg.norm(left, axis=1) / np.linalg.norm(right, axis=1)
    assert values == pytest.approx(expected.tolist(), abs=1e-6)

    choose(page, "score", "test/cross", "test/reranker")
    texts = ["Paris is in France.", "Berlin is in Germany.", "Bread is made of flour.", "The river runs north."]
    typed(page, "#texts", "\n".join(texts))
    ask(page, 3)
    ranks = [{entry["item_id"]: entry["rank"] + 1 for entry in by_curl(page, at)["scores"]} for at in (0, 1)]
    for row in page.evaluate(CELLS.format(".ranks tbody")):
        item = f"item-{texts.index(row[0])}"
        before, after = ranks[0][item], ranks[1][item]
        assert row[1:3] == [str(before), str(after)]
        assert (row[3] == "same") is (before == after)
        assert ("▲" in row[3]) is (after < before)
    by_id = {entry["item_id"]: entry["score"] for entry in by_curl(page)["scores"]}
    values = dict(by_python(page, '[[one["item_id"], one["score"]] for one in results["scores"]]'))
    assert values == {name: pytest.approx(score, rel=1e-6) for name, score in by_id.items()}
    values = dict(by_typescript(page, package, "results.scores.map((one) => [one.itemId, one.score])"))
    assert values == {name: pytest.approx(score, rel=1e-6) for name, score in by_id.items()}
    shown = bars(page, "article:nth-of-type(2)")
    assert [value for _, value in shown] == pytest.approx(sorted(by_id.values(), reverse=True), abs=6e-5)


def test_code_names_the_key_and_never_shows_it(page: Page, cluster: Cluster, package: Path) -> None:
    page.evaluate(f"sessionStorage.setItem('sie.key', '{KEY}')")
    page.open(f"http://{HOST}:{cluster.port}/?again")
    page.wait("document.querySelector('#sign-out') && document.querySelector('#model')?.value", bool)
    page.evaluate(COPIED)
    choose(page, "encode", "test/mini")
    typed(page, "#texts", "a cat")
    ask(page)
    (item,) = by_curl(page)["items"]
    sdk_vector = by_python(page, 'results[0]["dense"].tolist()')
    assert sdk_vector == pytest.approx(item["dense"]["values"], abs=1e-6)
    sdk_vector = by_typescript(page, package, "[...results[0]!.dense!]")
    assert sdk_vector == pytest.approx(item["dense"]["values"], abs=1e-6)
    for kind, name in (("curl", "$SIE_API_KEY"), ("Python", "SIE_API_KEY"), ("TypeScript", "process.env.SIE_API_KEY")):
        code = copied(page, kind)
        assert name in code
        assert KEY not in code
    assert KEY not in page.evaluate("document.body.innerHTML")
    assert KEY not in page.evaluate("JSON.stringify(localStorage) + document.cookie")
