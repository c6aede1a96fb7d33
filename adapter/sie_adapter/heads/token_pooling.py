"""Reduction of the token vectors (rows) of a text for late interaction: similar rows are replaced by their mean.

    rows [tokens, width] ──► the first rows stay; Ward's clusters of the other rows ──► means [fewer, width]

The method is sentence-transformers' HierarchicalTokenPooling. As there, scipy computes the clusters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sie_contracts.models.load_errors import incompatible

# Largest number of rows (token vectors) of a text: the distances between all pairs of 8,192 rows need 0.5 GB. A model
# with token pooling whose max_tokens is larger is refused.
MAX_ROWS = 8192


@dataclass(frozen=True)
class TokenPooling:
    """Settings for the reduction of token vectors. `protected`: number of vectors at the start of an item that are not
    changed. `factor`: the other vectors are merged to about 1 / `factor` of their number. `normalizes`: whether the
    result is scaled to length 1. `queries`, `documents`: whether the vectors of queries, and of documents, are reduced.
    """

    factor: float
    protected: int
    normalizes: bool
    queries: bool
    documents: bool

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the reduced token vectors of one item. `rows`: its token vectors, finite float32 [tokens, width]."""
        rest = rows[self.protected :]
        clusters = max(int(len(rest) // self.factor), 1)
        if self.factor > 1 and clusters < len(rest):
            rows = torch.cat([rows[: self.protected], _means(rest, clusters)])
        return functional.normalize(rows, p=2, dim=-1) if self.normalizes else rows


def token_pooling_of(config: Mapping[str, Any]) -> TokenPooling:
    """Return the settings in config.json of a HierarchicalTokenPooling. Raises ModelLoadFailed INCOMPATIBLE for a value
    that is out of range.
    """
    factor, protected = config.get("pool_factor", 1.0), config.get("num_protected_tokens", 1)
    if not (isinstance(factor, int | float) and factor >= 1 and isinstance(protected, int) and protected >= 0):
        raise incompatible(
            f"token pooling: pool_factor is {factor!r}, expected at least 1; "
            f"num_protected_tokens is {protected!r}, expected at least 0",
        )
    tasks = config.get("tasks", ["document"])
    tasks = [tasks] if isinstance(tasks, str) else tasks
    # False is the default of sentence-transformers for a file without this field
    normalizes = bool(config.get("normalize_embeddings", False))
    return TokenPooling(float(factor), protected, normalizes, "query" in tasks, "document" in tasks)


def _means(rows: Tensor, clusters: int) -> Tensor:
    from scipy.cluster import hierarchy
    from scipy.spatial.distance import squareform

    own = rows.cpu()
    distances = (1 - own @ own.T).clamp_(0, 2).numpy()
    tree = hierarchy.linkage(squareform(distances, checks=False), method="ward")
    labels = torch.from_numpy(hierarchy.fcluster(tree, t=clusters, criterion="maxclust")).long()
    _, places, sizes = labels.unique(return_inverse=True, return_counts=True)
    sums = torch.zeros(len(sizes), own.shape[1]).index_add_(0, places, own)
    return (sums / sizes[:, None]).to(rows.device)
