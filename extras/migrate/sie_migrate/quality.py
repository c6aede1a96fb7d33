"""Agreement of the old and the new model on a sample. With human judgements, also the quality of both models.

sample ──► `sie models compare` ──► Agreement         folder with judgements ──► `sie eval` ──► NDCG
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sie_cli.refusal import CommandRefused
from sie_client import SIEClient
from sie_migrate import compare
from sie_migrate.compare import Agreement

if TYPE_CHECKING:
    from sie_evals.tasks import Retrieval

NEIGHBOURS = 10
NDCG = "ndcg@10"


@dataclass(frozen=True)
class QualityMeasurement:
    """Agreement and quality of two models. `ndcg`: NDCG of the old and the new model; None without judgements."""

    agreement: Agreement
    ndcg: tuple[float, float] | None = None

    @property
    def neighbours(self) -> int:
        return min(NEIGHBOURS, len(self.agreement.recall))

    @property
    def overlap(self) -> float:
        """Return the share of nearest neighbours that both models find, as a mean over the queries or texts."""
        return float(self.agreement.recall[self.neighbours - 1])

    @property
    def rank(self) -> float | None:
        """Return the mean of `Agreement.ranks`; None if no text has a rank correlation."""
        ranks = self.agreement.ranks
        return sum(ranks) / len(ranks) if ranks else None

    def figures(self) -> dict[str, Any]:
        return {
            "neighbours": self.neighbours,
            "agreement": self.overlap,
            "by_chance": self.agreement.chance[self.neighbours - 1],
            "rank_correlation": self.rank,
            "ndcg": None if self.ndcg is None else dict(zip(("old", "new"), self.ndcg, strict=True)),
        }

    def line(self) -> str:
        chance = self.agreement.chance[self.neighbours - 1]
        parts = [f"the models share {self.overlap:.3f} of {self.neighbours} neighbours (by chance {chance:.3f})"]
        if self.rank is not None:
            parts.append(f"rank correlation {self.rank:.3f}")
        if self.ndcg is not None:
            parts.append(f"{NDCG} old {self.ndcg[0]:.4f}, new {self.ndcg[1]:.4f}")
        return ", ".join(parts)


@dataclass(frozen=True)
class QuerySet:
    """Queries to compare the models with. `judged`: these queries with human judgements; None without judgements."""

    texts: Sequence[str] = ()
    judged: Retrieval | None = None

    @classmethod
    def read(cls, path: Path | None) -> QuerySet:
        """Read a file with one query per line, or a folder in BEIR's format with judgements. Raises CommandRefused."""
        if path is None:
            return cls()
        if path.is_dir():
            if importlib.util.find_spec("pytrec_eval") is None:
                raise CommandRefused("--queries with judgements needs a package: pip install 'sie-cluster[evals]'")
            from sie_evals.tasks import of_folder

            task = of_folder(path)
            return cls(tuple(task.queries.values()), task)
        queries = compare.read(path, compare.MAX_TEXTS).queries
        if not queries:
            raise CommandRefused(f"--queries {path}: expected a query in each line")
        return cls(queries)


def measure(
    client: SIEClient, url: str, names: tuple[str, str], sample: Sequence[str], queries: QuerySet
) -> QualityMeasurement:
    """Compare the old and the new model (`names`) on the sample. Raises CommandRefused and SIEError."""
    agreement = compare.of_vectors(client, names, sample, queries.texts)
    if queries.judged is None:
        return QualityMeasurement(agreement)
    old, new = (_ndcg(client, url, name, queries.judged) for name in names)
    return QualityMeasurement(agreement, (old, new))


def _ndcg(client: SIEClient, url: str, model: str, task: Retrieval) -> float:
    from sie_evals.quality import measure as measured
    from sie_evals.sources import Sie
    from sie_evals.steps import EvalStep, EvalWork, ResultCache

    source = Sie(model, client, model, url, None, client.get_model(model))
    with tempfile.TemporaryDirectory(prefix="sie-migrate-") as folder:
        scores = measured(task, EvalStep(source, source.main), EvalWork(ResultCache(Path(folder)), lambda done: None))
    return scores.scores[NDCG]
