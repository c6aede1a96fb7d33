"""Work items for tests of the choice of batches, which need only the fields of `Queued`."""

import math
from typing import Generic, TypeVar

from sie_sidecar.batch import BatchKey, Queued

T = TypeVar("T")


class BatchEntry(Queued, Generic[T]):
    """Tokenised work item. `work`: what a test knows it by."""

    def __init__(
        self,
        key: BatchKey,
        cost: int,
        arrived_s: float,
        work: T,
        bulk: bool = False,
        alone: bool = False,
        due_s: float = math.inf,
        budget_s: float = math.inf,
        time_cost: float = 0.0,
        media_bytes: int = 0,
    ) -> None:
        super().__init__(
            key=key,
            cost=cost,
            arrived_s=arrived_s,
            bulk=bulk,
            alone=alone,
            due_s=due_s,
            budget_s=budget_s,
            time_cost=time_cost,
            media_bytes=media_bytes,
        )
        self.work = work
