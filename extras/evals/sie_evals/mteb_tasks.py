"""Tasks of the library mteb, on the revisions of datasets that mteb names. mteb measures a source (a cluster, a library
or a server) as if the source were a model in this process.

mteb/NAME ──► mteb.get_task ──► datasets of the hub ──► Mteb ──► mteb.evaluate with a source as the model
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sie_cli.refusal import CommandRefused

if TYPE_CHECKING:
    from sie_evals.steps import EvalStep, EvalWork

PREFIX = "mteb/"
CONNECT_S = 5.0  # seconds to connect to the hub; if this fails, `find` reads datasets only from the local cache
# metrics that are shown after a task's main metric, if the task has them
_ALSO = ("ndcg_at_10", "map_at_100", "recall_at_100", "cosine_spearman", "accuracy", "f1", "v_measure", "map", "ap")
_MAX_METRICS = 4


class NoHub(Exception):
    """Raised if a task of mteb cannot be loaded here: the library is missing, or its datasets cannot be read."""


@dataclass(frozen=True)
class Mteb:
    """A task of mteb with its data. `task`: mteb.AbsTask."""

    name: str
    task: Any

    @property
    def texts(self) -> list[str]:
        return list(dict.fromkeys(_texts(self.task.dataset)))


def find(name: str) -> Mteb:
    """Load a task of mteb. If the hub is unreachable, read the task's datasets from the cache of huggingface_hub.
    Raises CommandRefused for a name that the library does not have, and NoHub if the task cannot be loaded.
    """
    try:
        import httpx
        from huggingface_hub import constants
        from huggingface_hub.errors import HfHubHTTPError

        try:
            httpx.head(constants.ENDPOINT, timeout=CONNECT_S)
        except httpx.TransportError:
            # without this setting, huggingface_hub would retry each file for half a minute
            constants.HF_HUB_OFFLINE = True
        import mteb
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise NoHub(f"the package {error.name} is not installed (pip install 'sie-cluster[mteb]')") from error
    try:
        task = mteb.get_task(name)
    except KeyError as error:
        raise CommandRefused(f"-t {PREFIX}{name[:100]}: the library mteb: {error.args[0]}") from error
    try:
        task.load_data()
    except (OSError, DatasetsError, HfHubHTTPError) as error:
        if constants.HF_HUB_OFFLINE:
            raise NoHub(f"the hub cannot be reached at {constants.ENDPOINT}") from error
        raise NoHub(f"the hub does not deliver {task.metadata.dataset['path']}: {type(error).__name__}") from error
    return Mteb(name, task)


def measure(task: Mteb, step: EvalStep, work: EvalWork) -> dict[str, float]:
    """Measure a step (source and output) on the task. Return the values by metric, the main metric first."""
    import mteb

    model: Any = _CrossEncoder(step, work) if step.source.scores_pairs else _Encoder(step, work)
    results = mteb.evaluate(model, task.task, cache=None, show_progress_bar=False)
    (result,) = results.task_results
    main = task.task.metadata.main_score
    scores = [subset for subsets in result.scores.values() for subset in subsets]
    scores_by_metric = {main: float(result.get_score())}
    for name in _ALSO:
        values = [subset[name] for subset in scores if isinstance(subset.get(name), float)]
        if name != main and len(values) == len(scores) and len(scores_by_metric) < _MAX_METRICS:
            scores_by_metric[name] = float(np.mean(values))
    return scores_by_metric


class _MtebModel:
    def __init__(self, step: EvalStep, work: EvalWork) -> None:
        from mteb.models.model_meta import ModelMeta

        self._step, self._work = step, work
        name = step.name.replace("/", "_").replace(":", "_").replace(" ", "_")
        self.mteb_model_meta = ModelMeta.create_empty({"name": f"sie-eval/{name}", "revision": "measured"})


class _Encoder(_MtebModel):
    """mteb.EncoderProtocol for a source. The source adds its own prompts to the texts, not those of mteb's task."""

    def encode(self, inputs: Any, *, prompt_type: Any = None, **_: Any) -> Any:
        texts = list(_batch_texts(inputs))
        is_query = getattr(prompt_type, "value", None) == "query"
        return np.asarray(self._work.vectors(self._step, texts, is_query=is_query), np.float32)

    def similarity(self, left: Any, right: Any) -> Any:
        from mteb.similarity_functions import cos_sim

        return cos_sim(left, right)

    def similarity_pairwise(self, left: Any, right: Any) -> Any:
        from mteb.similarity_functions import pairwise_cos_sim

        return pairwise_cos_sim(left, right)


class _CrossEncoder(_MtebModel):
    """mteb.CrossEncoderProtocol for a source. Consecutive pairs with the same query become one request."""

    def predict(self, inputs1: Any, inputs2: Any, **_: Any) -> Any:
        scores: list[float] = []
        pairs = zip(_batch_texts(inputs1), _batch_texts(inputs2), strict=True)
        for query, same in itertools.groupby(pairs, key=lambda pair: pair[0]):
            scores += self._work.scores(self._step.source, query, [document for _, document in same])
        return np.asarray(scores, np.float32)


def _batch_texts(inputs: Any) -> Iterator[str]:
    for batch in inputs:
        if "text" not in batch:
            raise CommandRefused(f"-t: the task's inputs are {', '.join(batch)}: only tasks with texts are supported")
        yield from batch["text"]


def _texts(batch: Any) -> Iterator[str]:
    """Yield the texts in a dataset or a map of datasets. Strings without spaces count as ids or labels: skip them."""
    if hasattr(batch, "column_names") and isinstance(batch.column_names, list):
        for name in batch.column_names:
            for value in batch[name]:
                yield from _strings(value)
    elif hasattr(batch, "values"):
        for column in batch.values():
            yield from _texts(column)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        if " " in value.strip():
            yield value
    elif isinstance(value, Sequence):
        for part in value:
            yield from _strings(part)
