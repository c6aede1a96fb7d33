"""Trace spans of the device: `forward` for the pass of a batch, `inference` and `postprocess` for each work item of the
batch that has a trace. The spans are recorded after the reply to the batch, so that no reply waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sie_contracts.wire.ipc import BatchDone, Refused, Reply
from sie_contracts.wire.trace_context import Context
from sie_runtime.current_trace import STAGE

if TYPE_CHECKING:
    from sie_adapter.engine.device_threads import DeviceJob
    from sie_runtime.spans import Tracer


def ran(tracer: Tracer, job: DeviceJob, reply: Reply, began_ns: int, ended_ns: int) -> None:
    """Record the trace spans of a batch that ran from `began_ns` to `ended_ns`, nanoseconds since 1970. Record nothing
    for a batch without a trace.
    """
    batch = job.message
    if not batch.traceparent:
        return
    above = Context(batch.traceparent, batch.tracestate)
    own = {"sie.batch": batch.batch, "sie.model": batch.model, "sie.operation": batch.operation}
    forward = tracer.begin("forward", above, start_ns=began_ns, attributes=own)
    if isinstance(reply, BatchDone):
        between_ns = ended_ns - round(reply.postprocess_ms * 1e6)
        stages = (
            ("inference", between_ns - round(reply.inference_ms * 1e6), between_ns),
            ("postprocess", between_ns, ended_ns),
        )
        for group in batch.groups:
            if not group.traceparent:
                continue
            work = Context(group.traceparent, group.tracestate)
            attributes: dict[str, str | int] = {"sie.batch": batch.batch, "sie.rows": group.stop - group.start}
            for name, start_ns, end_ns in stages:
                tracer.begin(
                    name, work, links=[forward], start_ns=start_ns, attributes={**attributes, STAGE: name}
                ).end(end_ns)
        forward.set(
            {"sie.batch.rows": len(batch.lengths) // 4, "sie.batch.padding": reply.padding, "sie.engine": reply.engine}
        )
    elif isinstance(reply, Refused):
        forward.fail(reply.error.code)
    forward.end(ended_ns)
