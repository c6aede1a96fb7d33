"""`sie models compare`: agreement of two models on a sample, before one replaces the other.

sample ──► both models, over the API ──► vectors ──► cosine of each text (equal widths); neighbours in common, and
                                    │                 correlation of each text's similarities to all others (any widths)
                                    └──► scores ──► correlation of ranks
"""

from __future__ import annotations

import html
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
import numpy as np
from numpy.typing import NDArray

from sie_cli import display
from sie_cli.cluster import GATEWAY_URL, Cluster, cluster_options
from sie_cli.gateway_client import ModelDescription, described
from sie_cli.refusal import CommandRefused
from sie_contracts.errors import UNDECODABLE
from sie_contracts.settings import public_url
from sie_runtime.ranks import spearman

if TYPE_CHECKING:
    from sie_client import SIEClient

MAX_TEXTS = 2000  # maximum of --limit: the memory grows with the square of the number of texts
MIN_TEXTS = 3
MAX_NEIGHBOURS = 50
SHOWN = (1, 5, 10, 50)
# If a sample has only texts, a reranker gets the first 20 texts as queries, each with at most 50 other texts as
# documents. The numbers are small, because a reranker runs once for each pair.
QUERIES, DOCUMENTS = 20, 50
BINS = 40
# size of a panel of the plot and its margins, in pixels
COLOURS = ("#1b6ca8", "#c8553d")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 420, 70, 20, 30, 50
# vectors, [texts, width], each row a unit vector (L2 norm 1) or zero; or similarities, [queries, texts]
Matrix = NDArray[np.float32]


@dataclass(frozen=True)
class ComparisonSample:
    """Sample for a comparison. `rankings`: (query, documents) for rerankers. `texts`: the plain texts, and the
    documents of the rankings. `queries`: the plain texts, and the queries of the rankings.
    """

    texts: tuple[str, ...] = ()
    rankings: tuple[tuple[str, tuple[str, ...]], ...] = ()
    queries: tuple[str, ...] = ()


@dataclass(frozen=True)
class Agreement:
    """Agreement of two models. `cosines`: for each text, the cosine of its two vectors; empty if the widths differ.
    `recall`: at index k - 1, the share of the k nearest neighbours that both models have in common. `ranks`: for each
    query or text, the rank correlation of its scores or similarities from both models. `ranks` omits a query or text if
    all its values from one model are equal.
    """

    names: tuple[str, str]
    dims: tuple[int, int] = (0, 0)
    fingerprints: tuple[str, str] = ("", "")
    cosines: Sequence[float] = ()
    recall: Sequence[float] = ()
    chance: Sequence[float] = ()  # at index k - 1, the expected recall of k random neighbours
    ranks: Sequence[float] = ()
    notes: list[str] = field(default_factory=list)


@click.command()
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@click.option(
    "--sample",
    "sample_file",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="File with texts: one a line, or JSON lines. In a .jsonl file each line must be JSON.",
)
@click.option(
    "--queries",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="File with queries, in the format of --sample. Compare the nearest texts of each query, not of each text.",
)
@click.option(
    "--limit",
    type=click.IntRange(MIN_TEXTS, MAX_TEXTS),
    default=MAX_TEXTS,
    show_default=True,
    help="Maximum number of texts to read.",
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write a plot of cosines and recall to this file, as SVG.",
)
@cluster_options(GATEWAY_URL)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def compare(
    cluster: Cluster,
    first: str,
    second: str,
    sample_file: Path,
    queries: Path | None,
    limit: int,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Measure how well models A and B agree on a sample of texts. A gateway runs the texts through both models.

    \b
    For models that encode:
      cosine     of the two vectors of each text, if both models have the same width. It is 1 only if both models
                 use the vector space alike. For models that were trained separately it is near 0, even if both find
                 the same neighbours.
      recall@k   the share of a text's k nearest neighbours in the sample that both models find; for any widths. It
                 shows how much search results change if the index is built again with the other model.
      rank correlation (Spearman's) of the similarities of each text with all other texts: 1 is the same order.
    For models that score:
      rank correlation (Spearman's) of the scores of each query's documents: 1 is the same order.

    \b
    A sample has one text per line, or JSON lines: {"text": "..."}, for rerankers {"query": "...", "documents": ["...",
    "..."]}. From plain texts, rerankers use the first lines as queries. The requests have priority bulk. If the
    gateway requires a token: SIE_API_KEY is sent. Without it, SIE_ADMIN_TOKEN is sent, but only to the gateway that
    SIE_GATEWAY_URL or SIE_BASE_URL names.

    \b
    sie models compare BAAI/bge-m3 my/model --sample texts.txt --plot agreement.svg

    Status 0: the models were compared, however much they differ. 1: they could not be compared, for example because no
    gateway answered. 2: an option is wrong.
    """
    url, token = cluster.gateway_urls[0], cluster.gateway_token
    sample, query_sample = read(sample_file, limit), read(queries, limit) if queries else ComparisonSample()
    from sie_client import SIEClient
    from sie_client.errors import SIEConnectionError, SIEError

    try:
        with SIEClient(
            url, api_key=token.reveal() if token else None, connection_budget_s=cluster.first_patience_s
        ) as client:
            agreement = _compared(client, (first, second), sample, query_sample.queries)
    except SIEConnectionError as error:
        raise CommandRefused(cluster.without_gateway(url, error)) from error
    except SIEError as error:
        where = f"answered by the gateway at {public_url(url)}: `sie models list` shows its models"
        raise CommandRefused(f"{error}\n{where}, --url names another gateway") from error
    if plot is not None:
        try:
            plot.write_text(svg(agreement), "utf-8")
        except OSError as error:
            raise CommandRefused(f"--plot {plot}: the file cannot be written: {error.strerror}") from error
    click.echo(display.document(figures(agreement)) if as_json else "\n".join(lines(agreement)))


def read(file: Path, limit: int) -> ComparisonSample:
    """Read a sample, until it has `limit` texts or rankings. Drop repeated texts, because equal texts would be each
    other's nearest neighbours. Raises CommandRefused.
    """
    texts, queries = dict[str, None](), dict[str, None]()
    rankings: list[tuple[str, tuple[str, ...]]] = []
    try:
        with file.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if len(texts) >= limit or len(rankings) >= limit:
                    break
                if not (line := line.strip()):
                    continue
                where = f"{file}, line {number}"
                match _read_line(line, where, is_json=file.suffix == ".jsonl"):
                    case str(text):
                        texts[text] = queries[text] = None
                    case (query, documents):
                        if len(documents) > limit:
                            raise CommandRefused(f"{where}: {len(documents):,} documents, expected at most {limit:,}")
                        rankings.append((query, documents))
                        queries[query] = None
                        texts.update(dict.fromkeys(documents))
    except (OSError, UnicodeDecodeError) as error:
        raise CommandRefused(f"{file}: {error}: expected a text file in UTF-8") from error
    return ComparisonSample(tuple(texts), tuple(rankings), tuple(queries))


def _read_line(line: str, where: str, *, is_json: bool) -> str | tuple[str, tuple[str, ...]]:
    """Return a line's text, or (query, documents). `is_json`: only JSON is valid. Raises CommandRefused."""
    if not is_json and not line.startswith("{"):
        return line
    try:
        value = msgspec.json.decode(line, type=dict[str, Any])
    except UNDECODABLE as error:
        if is_json:
            raise CommandRefused(
                f"{where}: not a JSON object, which each line of a .jsonl file must be: {error}"
            ) from error
        return line  # a plain text that begins with a brace
    query, documents = value.get("query"), value.get("documents")
    if isinstance(text := value.get("text"), str):
        return text
    if isinstance(query, str) and isinstance(documents, list) and all(isinstance(text, str) for text in documents):
        return query, tuple(dict.fromkeys(documents))
    raise CommandRefused(f'{where}: expected {{"text": "..."}} or {{"query": "...", "documents": ["...", "..."]}}')


def _compared(client: SIEClient, names: tuple[str, str], sample: ComparisonSample, queries: Sequence[str]) -> Agreement:
    infos = [described(client.get_model(name), ModelDescription) for name in names]
    if all("dense" in info.dims for info in infos):
        return of_vectors(client, names, sample.texts, queries)
    if all("score" in info.tasks for info in infos):
        return _ranks(client, names, sample)
    outputs = "; ".join(f"{name} has {', '.join(info.outputs)}" for name, info in zip(names, infos, strict=True))
    raise CommandRefused(
        f"there is nothing to compare: {outputs}. Expected two models with dense vectors, or two models with scores"
    )


def of_vectors(
    client: SIEClient, names: tuple[str, str], texts: Sequence[str], queries: Sequence[str] = ()
) -> Agreement:
    """Compare two encoding models by the nearest neighbours of each query among the texts. Without queries, compare
    the nearest neighbours of each text. Raises CommandRefused and SIEError.
    """
    if len(texts) < MIN_TEXTS:
        raise CommandRefused(
            f"--sample has {len(texts)} different texts; at least {MIN_TEXTS} are needed, and "
            "some hundreds for a meaningful result"
        )
    matrices: list[tuple[Matrix, Matrix]] = []
    fingerprints = []
    for name in names:
        rows, fingerprint = _encoded(client, name, texts, is_query=False)
        asking = _encoded(client, name, queries, is_query=True)[0] if queries else rows
        matrices.append((rows, asking))
        fingerprints.append(fingerprint)
    (first, first_asks), (second, second_asks) = matrices
    dims = first.shape[1], second.shape[1]
    notes = []
    if dims[0] != dims[1]:
        notes.append(
            f"the widths differ, {dims[0]} and {dims[1]}: there is no cosine between the two, and no index holds both"
        )
    elif fingerprints[0] != fingerprints[1]:
        notes.append("the fingerprints differ: vectors of both models must not be in one index, whatever their cosine")
    most = min(MAX_NEIGHBOURS, len(texts) - (0 if queries else 1))
    own = not queries
    similar = similarities(first_asks, first, own=own), similarities(second_asks, second, own=own)
    recall = agreement_at(nearest(similar[0], most), nearest(similar[1], most))
    neighbours = [_without_own(matrix) for matrix in similar] if own else similar
    ranks = [value for pair in zip(*neighbours, strict=True) if (value := spearman(*pair)) is not None]
    chance = [k / (len(texts) - own) for k in range(1, most + 1)]
    cosines = np.einsum("ij,ij->i", first, second).tolist() if dims[0] == dims[1] else []
    return Agreement(names, dims, (fingerprints[0], fingerprints[1]), cosines, recall, chance, ranks, notes)


def _encoded(client: SIEClient, model: str, texts: Sequence[str], *, is_query: bool) -> tuple[Matrix, str]:
    results = client.encode(
        model,
        list(texts),
        is_query=is_query,
        output_types=["dense"],
        output_dtype="float32",
        on_item_error="fail",
        priority="bulk",
    )
    vectors = [vector for result in results if (vector := result.get("dense")) is not None]
    if len(vectors) != len(results) or len({vector.shape for vector in vectors}) != 1:
        raise CommandRefused(f"{model} returned vectors of different widths or no vectors, so it cannot be compared")
    rows = np.stack(vectors).astype(np.float64)
    if rows.ndim != 2 or not np.isfinite(rows).all():
        raise CommandRefused(f"{model} returned vectors with NaN or infinity, so they cannot be compared")
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return (rows / np.where(lengths > 0, lengths, 1)).astype(np.float32), str(results[0]["fingerprint"])


def similarities(asking: Matrix, rows: Matrix, *, own: bool) -> Matrix:
    """Return the similarity of each query with each row, [queries, rows]. If `own` is true, `asking` equals `rows`, and
    the diagonal becomes -inf, because no text is its own neighbour.
    """
    similar: Matrix = asking @ rows.T
    if own:
        np.fill_diagonal(similar, -np.inf)
    return similar


def _without_own(similar: Matrix) -> Matrix:
    """Remove the diagonal from [texts, texts], because it pairs each text with itself. Return [texts, texts - 1]."""
    return similar[~np.eye(len(similar), dtype=bool)].reshape(len(similar), -1)


def nearest(similar: Matrix, most: int) -> NDArray[np.intp]:
    """Return for each query the indices of the rows with the largest similarities, best first: [queries, most]."""
    return np.argsort(-similar, axis=1, kind="stable")[:, :most]


def agreement_at(first: NDArray[np.intp], second: NDArray[np.intp]) -> list[float]:
    """Return the recall for each k, at index k - 1: the share of the first k rows that both rankings have in common, as
    a mean over the queries. `first`, `second`: row indices, best first, [queries, most].
    """
    most = first.shape[1]
    # A row is common to the first k + 1 rows of both rankings if neither position (from 0) exceeds k. shares[k] counts
    # the rows whose larger position is k, so the cumulative sum below counts the common rows.
    shares = np.zeros(most)
    for mine, theirs in zip(first.tolist(), second.tolist(), strict=True):
        places = {row: place for place, row in enumerate(theirs)}
        for place, row in enumerate(mine):
            if row in places:
                shares[max(place, places[row])] += 1
    common: list[float] = (np.cumsum(shares) / len(first) / np.arange(1, most + 1)).tolist()
    return common


def _ranks(client: SIEClient, names: tuple[str, str], sample: ComparisonSample) -> Agreement:
    rankings = sample.rankings or tuple(
        (query, tuple(text for text in sample.texts if text != query)[:DOCUMENTS]) for query in sample.texts[:QUERIES]
    )
    rankings = tuple(ranking for ranking in rankings if len(ranking[1]) >= MIN_TEXTS)
    if not rankings:
        raise CommandRefused(f"--sample has no query with at least {MIN_TEXTS} documents: add documents or plain texts")
    correlations = []
    fingerprints = {}
    with click.progressbar(rankings, label="scoring", file=sys.stderr, hidden=not sys.stderr.isatty()) as queries:
        for query, documents in queries:
            scores = []
            for name in names:
                result = client.score(name, query, list(documents), on_item_error="fail", priority="bulk")
                by_id = {entry["item_id"]: entry["score"] for entry in result["scores"]}
                scores.append(np.array([by_id[f"item-{number}"] for number in range(len(documents))], np.float64))
                fingerprints[name] = str(result["fingerprint"])
            if (value := spearman(*scores)) is not None:
                correlations.append(value)
    if not correlations:
        raise CommandRefused(
            "one of the models gives every document the same score: give documents of different relevance"
        )
    return Agreement(names, fingerprints=(fingerprints[names[0]], fingerprints[names[1]]), ranks=correlations)


def figures(agreement: Agreement) -> dict[str, Any]:
    """Return the figures of a comparison as the JSON object of --json."""
    document: dict[str, Any] = {
        "models": list(agreement.names),
        "fingerprints": list(agreement.fingerprints),
        "notes": agreement.notes,
    }
    if agreement.recall:
        document |= {"dims": list(agreement.dims), "cosine": _spread(agreement.cosines) if agreement.cosines else None}
        document["recall"] = {str(k): value for k, value in enumerate(agreement.recall, 1)}
    if agreement.ranks:
        document["rank_correlation"] = _spread(agreement.ranks)
    return document


def _spread(values: Sequence[float]) -> dict[str, float]:
    low, half = np.percentile(values, (5, 50)).tolist()
    return {
        "mean": float(np.mean(values)),
        "median": half,
        "p5": low,
        "min": float(min(values)),
        "count": float(len(values)),
    }


def lines(agreement: Agreement) -> list[str]:
    """Return the figures of a comparison as lines of text."""
    printed = [
        f"{name}: {f'{dims} wide, ' if dims else ''}fingerprint {fingerprint}"
        for name, dims, fingerprint in zip(agreement.names, agreement.dims, agreement.fingerprints, strict=True)
    ]
    for name, values in (("cosine", agreement.cosines), ("rank correlation", agreement.ranks)):
        if values:
            spread = _spread(values)
            printed.append(
                f"{name} of {len(values)}: "
                + ", ".join(f"{key} {spread[key]:.4f}" for key in ("mean", "median", "p5", "min"))
            )
    printed += [
        f"recall@{k}: {agreement.recall[k - 1]:.4f} (by chance {agreement.chance[k - 1]:.4f})"
        for k in SHOWN
        if k <= len(agreement.recall)
    ]
    return printed + [f"note: {note}" for note in agreement.notes]


def svg(agreement: Agreement) -> str:
    """Return an SVG with a histogram of the cosines, or of the rank correlations if there are no cosines. For models
    that encode, a second panel shows recall by k.
    """
    title = " and ".join(agreement.names)
    values, caption = agreement.cosines, "texts by cosine"
    if not values:
        values, caption = agreement.ranks, "queries by rank correlation"
    panels = ([_histogram(values, caption)] if values else []) + ([_recall(agreement)] if agreement.recall else [])
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT * len(panels) + TOP}" '
            'font-family="sans-serif" font-size="12">'
        ),
        f'<rect width="{WIDTH}" height="{HEIGHT * len(panels) + TOP}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-weight="bold">{html.escape(title)}</text>',
    ]
    for number, panel in enumerate(panels):
        parts += [f'<g transform="translate(0 {TOP + HEIGHT * number})">', *panel, "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _axes(title: str, x_name: str, x_ticks: Mapping[str, float], y_ticks: Mapping[str, float]) -> list[str]:
    parts = [
        f'<text x="{LEFT}" y="18">{title}</text>',
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 10}" text-anchor="end">{x_name}</text>',
    ]
    for text, place in y_ticks.items():
        y = _y(place)
        parts += [
            f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>',
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>',
        ]
    for text, place in x_ticks.items():
        parts.append(f'<text x="{_x(place):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{text}</text>')
    return parts


def _x(place: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * place


def _y(place: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * place


def _histogram(values: Sequence[float], title: str) -> list[str]:
    least = min(0.0, *values)
    counts, _ = np.histogram(np.clip(values, least, 1), BINS, (least, 1))
    most = int(counts.max())
    ticks = {f"{least + (1 - least) * part / 4:.2f}": part / 4 for part in range(5)}
    parts = _axes(title, "", ticks, {"0": 0.0, f"{most}": 1.0})
    for number, count in enumerate(counts.tolist()):
        left, top = _x(number / BINS), _y(count / most)
        width, height = (WIDTH - LEFT - RIGHT) / BINS - 1, _y(0) - top
        parts.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{COLOURS[0]}"/>'
        )
    return parts


def _recall(agreement: Agreement) -> list[str]:
    most = len(agreement.recall)
    ticks = {str(k): k / most for k in sorted({1, *(most * part // 5 for part in range(1, 6))}) if k}
    parts = _axes("neighbours in common", "neighbours", ticks, {f"{part / 5:.1f}": part / 5 for part in range(6)})
    for number, (name, values) in enumerate({"recall": agreement.recall, "by chance": agreement.chance}.items()):
        line = " ".join(f"{_x(k / most):.1f},{_y(value):.1f}" for k, value in enumerate(values, 1))
        colour, y = COLOURS[number], TOP + 16 + 18 * number
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{line}"/>')
        parts.append(f'<text x="{WIDTH - RIGHT - 60}" y="{y}" fill="{colour}">{name}</text>')
    return parts
