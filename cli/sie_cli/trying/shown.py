"""Display of a model's answer for people. Control characters in untrusted text are replaced."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sie_cli.display import counted, printable, problem
from sie_cli.trying.asking import ModelAnswer, strongest
from sie_contracts.stages import STAGE_WORDS

NUMBERS = 4  # number of values of a dense vector that are shown
LINES = 20  # maximum number of shown lines of a text that a model generated
LONGEST = 400  # maximum number of shown characters of a value that is not a text: it is shown as JSON
_CELL = 8  # width of a cell of a heat map, in characters
_SCALES = {
    "probability": "a probability, from 0 to 1",
    "logit": "a logit: above 0 is likely",
    "cosine": "a cosine, at most 1",
    "maxsim": "a sum of similarities of tokens: compare only scores of the same query",
}
# stages at the worker, in their order: key in the field `stages` of the reply's `explain` -> name of the stage
_AT_WORKER = {
    "fetch_ms": "fetch of the input",
    "device_wait_ms": "device wait",
    **{key.replace("_time", "_ms"): word for key, word in STAGE_WORDS.items()},
}


def shown(answer: ModelAnswer, width: int, *, has_colours: bool) -> Iterator[RenderableType]:
    """Yield the parts of the display of an answer, from top to bottom."""
    head = Text.assemble((printable(answer.info.name), "bold"), f"  {answer.verb}")
    yield head
    if answer.verb == "encode":
        yield from _encoded(answer, width)
    elif answer.verb == "score":
        yield from _scored(answer)
    else:
        yield from _extracted(answer, has_colours=has_colours)
    yield Text("")
    yield from _time(answer)
    if answer.question.explain:
        yield from _explained(answer)


def _encoded(answer: ModelAnswer, width: int) -> Iterator[RenderableType]:
    labels = [source.label for source in answer.question.inputs]
    for name in answer.info.dims:
        rows = [(number, result) for number, result in enumerate(answer.results) if name in result.get("outputs", {})]
        if not rows:
            continue
        yield Text("")
        described = rows[0][1]["outputs"][name]
        if name == "dense":
            yield Text(f"dense: {described['dims']:,} numbers, {described['dtype']}", "cyan")
            yield _dense(rows, labels)
            vectors = [np.asarray(result["dense"]) for _, result in rows]
            if len(rows) > 1 and np.issubdtype(vectors[0].dtype, np.floating):
                yield Text("")
                yield from _cosines(vectors, [number for number, _ in rows], width)
        elif name == "multivector":
            yield Text(f"multivector: {described['token_dims']:,} numbers a token, {described['dtype']}", "cyan")
            table = _table("#", "TOKENS x NUMBERS", "TEXT")
            for number, result in rows:
                tokens, numbers = np.asarray(result["multivector"]).shape
                table.add_row(str(number + 1), f"{tokens:,} x {numbers:,}", labels[number])
            yield table
        else:
            yield Text(f"sparse: weights of {described['dims']:,} words, {described['dtype']}", "cyan")
            for number, result in rows:
                yield from _sparse(answer, number, labels[number], result["sparse"])
    yield from _errors(answer, labels)


def _dense(rows: Sequence[tuple[int, Mapping[str, Any]]], labels: Sequence[str]) -> Table:
    table = _table("#", "NORM", "TOKENS", "FIRST NUMBERS", "TEXT")
    for number, values in rows:
        vector = np.asarray(values["dense"])
        norm = float(np.linalg.norm(vector.astype(np.float64)))
        first = "  ".join(
            f"{value:+.3f}" if isinstance(value, float) else f"{value:+d}" for value in vector[:NUMBERS].tolist()
        )
        table.add_row(str(number + 1), f"{norm:.3f}", f"{values['usage']['total_tokens']:,}", first, labels[number])
    return table


def _cosines(vectors: Sequence[Any], numbers: Sequence[int], width: int) -> Iterator[RenderableType]:
    """Yield a heat map with the cosine of each pair of texts, for as many texts as the width allows."""
    some = max(2, min(len(vectors), (width - 4) // _CELL))
    matrix = np.stack([vector.astype(np.float64) for vector in vectors])
    lengths = np.linalg.norm(matrix, axis=1, keepdims=True)
    matrix = matrix / np.where(lengths > 0, lengths, 1.0)
    similarities = matrix @ matrix.T
    yield Text("cosine of each pair", "cyan")
    yield Text("   " + "".join(f"{number + 1:>{_CELL - 1}} " for number in numbers[:some]), "bold")
    for row in range(some):
        line = Text(f"{numbers[row] + 1:>3}", "bold")
        for column in range(some):
            line.append(f"{similarities[row, column]:>{_CELL - 1}.3f} ", heat(float(similarities[row, column])))
        yield line
    if some < len(vectors):
        yield Text(f"  {counted(len(vectors) - some, 'more text')}; --json has all vectors", "bright_black")


def _sparse(answer: ModelAnswer, number: int, label: str, sparse: Mapping[str, Any]) -> Iterator[RenderableType]:
    ids, weights = strongest(sparse)
    count = len(sparse["values"])
    yield Text(f"{number + 1}  {label}", no_wrap=True, overflow="ellipsis")
    table = _table("WORD" if answer.words else "ID", "WEIGHT", "")
    for token, weight, share in zip(ids, weights, shares(weights), strict=True):
        word = printable(answer.words[token]) if token in answer.words else str(token)
        table.add_row(word if word.strip() else f"{word!r} (id {token})", f"{weight:.3f}", bar(share))
    yield table
    if count > len(ids):
        yield Text(f"  {counted(count - len(ids), 'weaker word')}", "bright_black")


def _scored(answer: ModelAnswer) -> Iterator[RenderableType]:
    inputs = answer.question.inputs
    assert answer.question.query is not None
    yield Text.assemble(("query: ", "cyan"), answer.question.query.label)
    ranked = [result for result in answer.results if result.get("score") is not None]
    scores = [float(result["score"]) for result in ranked]
    scale = answer.info.score_scale
    most = 1.0 if scale in ("probability", "cosine") else None
    table = _table("RANK", "SCORE", "", "#", "TEXT")
    for entry, share in zip(ranked, shares(scores, most=most), strict=True):
        place = answer.place(entry)
        table.add_row(str(entry["rank"] + 1), f"{entry['score']:.4f}", bar(share), str(place + 1), inputs[place].label)
    yield Text("")
    yield table
    if scale in _SCALES:
        yield Text(f"  a score is {_SCALES[scale]}", "bright_black")
    yield from _errors(answer, [inputs[answer.place(result)].label for result in answer.results])


def _extracted(answer: ModelAnswer, *, has_colours: bool) -> Iterator[RenderableType]:
    labels = [entity["label"] for result in answer.results for entity in result.get("entities", ())]
    colour_of = colours([*answer.question.labels, *labels])
    for number, (source, result) in enumerate(zip(answer.question.inputs, answer.results, strict=True)):
        yield Text("")
        if "error" in result:
            continue
        entities = result["entities"]
        spans = [
            LabelledSpan(entity["start"], entity["end"], entity["label"])
            for entity in entities
            if entity.get("start") is not None
        ]
        prefix = (f"{number + 1}  " if len(answer.results) > 1 else "", "bold")
        text = marked(source.text, spans, colour_of, has_colours=has_colours) if source.text else source.label
        yield Text.assemble(prefix, text)
        parts = list(_tables(result, colour_of))
        if not parts:
            hint = "; --threshold 0.1 shows what the model is less sure of" if answer.question.labels else ""
            yield Text(f"  nothing was found{hint}", "yellow")
        for part in parts:
            yield Text("")
            yield part
    yield from _errors(answer, [source.label for source in answer.question.inputs])


def _tables(result: Mapping[str, Any], colour_of: Mapping[str, str]) -> Iterator[RenderableType]:
    if result["entities"]:
        table = _table("LABEL", "TEXT", "SCORE", "PLACE")
        for row in result["entities"]:
            label = Text(printable(row["label"]), colour_of.get(row["label"], ""))
            table.add_row(label, printable(row["text"]), f"{row['score']:.3f}", _place(row))
        yield table
    if result["classifications"]:
        table = _table("CLASS", "SCORE", "")
        scores = [float(row["score"]) for row in result["classifications"]]
        for row, share in zip(result["classifications"], shares(scores, most=1.0), strict=True):
            table.add_row(printable(row["label"]), f"{row['score']:.3f}", bar(share))
        yield table
    if result["relations"]:
        table = _table("HEAD", "RELATION", "TAIL", "SCORE")
        for row in result["relations"]:
            table.add_row(*(printable(str(row[name])) for name in ("head", "relation", "tail")), f"{row['score']:.3f}")
        yield table
    if result["objects"]:
        table = _table("OBJECT", "SCORE", "PLACE")
        for row in result["objects"]:
            table.add_row(printable(row["label"]), f"{row['score']:.3f}", _place(row))
        yield table
    for name, value in result["data"].items():
        yield _datum(printable(name), value)


def _place(entity: Mapping[str, Any]) -> str:
    if entity.get("bbox"):
        x, y, width, height = (round(edge) for edge in entity["bbox"])
        return f"x {x}, y {y}, {width} x {height}"
    return f"{entity['start']} to {entity['end']}" if entity.get("start") is not None else ""


def _datum(name: str, value: object) -> Text:
    head = (f"{name}: ", "cyan")
    if not isinstance(value, str):
        text = printable(msgspec.json.encode(value).decode())
        return Text.assemble(head, text if len(text) <= LONGEST else f"{text[:LONGEST]}… (--json has all)")
    lines = printable(value, lines=True).splitlines()
    rest = len(lines) - LINES
    printed = [*lines[:LINES], *([f"… {counted(rest, 'more line')} (--json has all)"] if rest > 0 else [])]
    return Text.assemble(head, ("\n" if len(printed) > 1 else "") + "\n".join(printed))


def _table(*titles: str) -> Table:
    """Return an empty table. Numbers align right, bars have a minimum width, and texts a maximum width."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        is_number = title in ("#", "NORM", "TOKENS", "WEIGHT", "SCORE", "RANK", "MS")
        is_text = title in ("TEXT", "WORD", "HEAD", "TAIL")
        table.add_column(
            title,
            justify="right" if is_number else "left",
            no_wrap=True,
            overflow="ellipsis",
            min_width=BAR if title == "" else None,
            max_width=100 if is_text else None,
        )
    return table


def _errors(answer: ModelAnswer, labels: Sequence[str]) -> Iterator[RenderableType]:
    for result, label in zip(answer.results, labels, strict=True):
        if "error" in result:
            yield Text(f"failed: {label}: {printable(problem(result['error']))}", "red")


def _time(answer: ModelAnswer) -> Iterator[Text]:
    timing, usage = answer.shared["timing"], answer.shared["usage"]
    rest = timing["total_ms"] - timing["queue_ms"] - timing["inference_ms"]
    yield Text.assemble(
        (_ms(timing["total_ms"]), "bold"),
        f" in total: {_ms(timing['queue_ms'])} queue, {_ms(timing['inference_ms'])} inference, {_ms(rest)} other",
        f"; {counted(usage['total_tokens'], 'token')}",
    )
    if usage["truncated_items"]:
        yield Text(f"{counted(len(usage['truncated_items']), 'text')} cut to the model's length", "yellow")
    if not answer.info.loaded:
        yield Text("the model was loaded for this request; the next one is faster", "yellow")


def _ms(value: float) -> str:
    return f"{value:.1f} ms" if value < 1000 else f"{value / 1000:.1f} s"


def _explained(answer: ModelAnswer) -> Iterator[RenderableType]:
    timing = answer.shared["timing"]
    yield Text("")
    yield _stages([(name, timing[key]) for key, name in STAGE_WORDS.items()], timing["total_ms"])
    for chunk in answer.shared.get("explain", ()):
        batch = chunk.get("batch") or {}
        parts = [f"worker {chunk.get('worker')}", f"lane {chunk.get('lane')}", str(chunk.get("priority"))]
        if batch:
            parts.append(f"a batch of {counted(batch['items'], 'input')} with {counted(batch['tokens'], 'token')}")
            parts.append(f"engine {batch['engine']}")
        yield Text("")
        yield Text(printable(", ".join(parts)), "cyan")
        stages = chunk.get("stages", {})
        at_worker = [(word, stages[key]) for key, word in _AT_WORKER.items() if key in stages]
        yield _stages(at_worker, stages.get("worker_ms", 0.0))


def _stages(stages: Sequence[tuple[str, float]], total_ms: float) -> Table:
    table = _table("STAGE", "MS", "")
    for (name, value), colour in zip(stages, itertools.cycle(("cyan", "green", "magenta", "yellow"))):
        table.add_row(name, f"{value:.1f}", bar(value / total_ms if total_ms > 0 else 0.0, colour))
    return table


BAR = 24
_EIGHTHS = " ▏▎▍▌▋▊▉"
_COLOURS = ("green", "magenta", "cyan", "yellow", "blue", "red")
_COLD, _WARM = (24, 44, 92), (250, 204, 92)  # RGB of the lowest and the highest value in a heat map


def bar(share: float, colour: str = "cyan") -> Text:
    """Return a bar that fills `share` (0 to 1) of BAR cells. Any share above 0 is visible."""
    eighths = max(0, min(BAR * 8, round(share * BAR * 8)))
    if share > 0:
        eighths = max(1, eighths)
    full, rest = divmod(eighths, 8)
    return Text("█" * full + (_EIGHTHS[rest] if rest else ""), colour)


def shares(values: Sequence[float], most: float | None = None) -> list[float]:
    """Scale values linearly to 0 to 1. The lower end of the scale is 0, or the smallest value if it is negative. The
    upper end is `most`, or the largest value if `most` is None or smaller.
    """
    low = min(0.0, *values) if values else 0.0
    high = max(values, default=0.0) if most is None else max(most, *values)
    width = high - low
    return [(value - low) / width if width > 0 else 0.0 for value in values]


def heat(value: float) -> str:
    """Return the rich style of a heat-map cell: _COLD for values up to 0, _WARM from 1 on, and a mixture between."""
    share = max(0.0, min(1.0, value))
    red, green, blue = (round(cold + (warm - cold) * share) for cold, warm in zip(_COLD, _WARM, strict=True))
    return f"{'black' if share > 0.45 else 'white'} on rgb({red},{green},{blue})"


@dataclass(frozen=True)
class LabelledSpan:
    """Labelled part of a text; `start` and `end` count code points."""

    start: int
    end: int
    label: str


def colours(labels: Sequence[str]) -> dict[str, str]:
    return {label: _COLOURS[number % len(_COLOURS)] for number, label in enumerate(dict.fromkeys(labels))}


def marked(text: str, spans: Sequence[LabelledSpan], colour_of: dict[str, str], *, has_colours: bool) -> Text:
    """Return a text whose spans are in the colours of their labels, or in brackets if there are no colours."""
    shown = printable(text, lines=True)
    if has_colours:
        styled = Text(shown)
        for span in spans:
            styled.stylize(f"black on {colour_of[span.label]}", span.start, span.end)
        return styled
    opened, closed = Counter(span.start for span in spans), Counter(span.end for span in spans)
    pieces = []
    for place in range(len(shown) + 1):
        pieces.append("]" * closed[place] + "[" * opened[place])
        pieces.append(shown[place : place + 1])
    return Text("".join(pieces))
