"""Tasks of the library mteb, with its datasets at its revisions.

mteb/NAME ──► mteb.get_task ──► datasets of the hub ──► Mteb ──► mteb.evaluate with a source as the model
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sie_cli.refusal import Refused

if TYPE_CHECKING:
    from sie_cli.evals.steps import Step, Work

PREFIX = "mteb/"
CONNECT_S = 5.0  # to the hub
# beside the main metric of a task, where it has them
_ALSO = ("ndcg_at_10", "map_at_100", "recall_at_100", "cosine_spearman", "accuracy", "f1", "v_measure", "map", "ap")
_MAX_METRICS = 4


class NoHub(Exception):
    """The library is not installed, or its datasets cannot be read here."""


@dataclass(frozen=True)
class Mteb:
    """A task with its data. `task`: mteb.AbsTask."""

    name: str
    task: Any

    @property
    def texts(self) -> list[str]:
        """All texts of its datasets."""
        return list(dict.fromkeys(_texts(self.task.dataset)))


def find(name: str) -> Mteb:
    """The task of the library. Without the hub its datasets are those of the cache of huggingface_hub.

    Raises Refused for a name that the library does not know, NoHub.
    """
    try:
        import httpx
        from huggingface_hub import constants
        from huggingface_hub.errors import HfHubHTTPError

        try:
            httpx.head(constants.ENDPOINT, timeout=CONNECT_S)
        except httpx.TransportError:
            constants.HF_HUB_OFFLINE = True  # else each file is asked for again and again, for half a minute
        import mteb
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise NoHub(f"the package {error.name} is not installed (pip install 'sie-cluster[mteb]')") from error
    try:
        task = mteb.get_task(name)
    except KeyError as error:
        raise Refused(f"-t {PREFIX}{name[:100]}: the library mteb: {error.args[0]}") from error
    try:
        task.load_data()
    except (OSError, DatasetsError, HfHubHTTPError) as error:
        if constants.HF_HUB_OFFLINE:
            raise NoHub(f"the hub cannot be reached at {constants.ENDPOINT}") from error
        raise NoHub(f"the hub does not give {task.metadata.dataset['path']}: {type(error).__name__}") from error
    return Mteb(name, task)


def measure(task: Mteb, step: Step, work: Work) -> dict[str, float]:
    """Its metrics, the main one first."""
    import mteb

    model: Any = _CrossEncoder(step, work) if step.source.scores_pairs else _Encoder(step, work)
    told = mteb.evaluate(model, task.task, cache=None, show_progress_bar=False)
    (result,) = told.task_results
    main = task.task.metadata.main_score
    scores = [each for subsets in result.scores.values() for each in subsets]
    found = {main: float(result.get_score())}
    for name in _ALSO:
        values = [each[name] for each in scores if isinstance(each.get(name), float)]
        if name != main and len(values) == len(scores) and len(found) < _MAX_METRICS:
            found[name] = float(np.mean(values))
    return found


class _Model:
    def __init__(self, step: Step, work: Work) -> None:
        from mteb.models.model_meta import ModelMeta

        self._step, self._work = step, work
        name = step.name.replace("/", "_").replace(":", "_").replace(" ", "_")
        self.mteb_model_meta = ModelMeta.create_empty({"name": f"sie-eval/{name}", "revision": "measured"})


class _Encoder(_Model):
    """mteb.EncoderProtocol over a source. Texts have the prompts of the model, not those of the task."""

    def encode(self, inputs: Any, *, prompt_type: Any = None, **_: Any) -> Any:
        texts = list(_of(inputs))
        is_query = getattr(prompt_type, "value", None) == "query"
        return np.asarray(self._work.vectors(self._step, texts, is_query=is_query), np.float32)

    def similarity(self, one: Any, two: Any) -> Any:
        from mteb.similarity_functions import cos_sim

        return cos_sim(one, two)

    def similarity_pairwise(self, one: Any, two: Any) -> Any:
        from mteb.similarity_functions import pairwise_cos_sim

        return pairwise_cos_sim(one, two)


class _CrossEncoder(_Model):
    """mteb.CrossEncoderProtocol over a source. Pairs of one query that follow each other are one request."""

    def predict(self, inputs1: Any, inputs2: Any, **_: Any) -> Any:
        found: list[float] = []
        pairs = zip(_of(inputs1), _of(inputs2), strict=True)
        for query, same in itertools.groupby(pairs, key=lambda pair: pair[0]):
            found += self._work.scores(self._step.source, query, [document for _, document in same])
        return np.asarray(found, np.float32)


def _of(inputs: Any) -> Iterator[str]:
    for batch in inputs:
        if "text" not in batch:
            raise Refused(f"the task has {', '.join(batch)}: what is measured here are tasks of texts")
        yield from batch["text"]


def _texts(found: Any) -> Iterator[str]:
    """Strings of a dataset, or of a map of datasets. Ids and labels, which have no spaces, are not."""
    if hasattr(found, "column_names") and isinstance(found.column_names, list):
        for name in found.column_names:
            for value in found[name]:
                yield from _strings(value)
    elif hasattr(found, "values"):
        for each in found.values():
            yield from _texts(each)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        if " " in value.strip():
            yield value
    elif isinstance(value, Sequence):
        for each in value:
            yield from _strings(each)
