"""Search for the work that ends gateways. The functions change the record of a job and do no I/O.

A leader that ends may have been ended by its work, or by anything else. So work is blamed only for what happened while
it ran alone:

    a leader ends ──► the first unanswered shards are suspects, and each runs alone ──► it is answered: no suspect
                          └──► a leader ends while it runs alone: its PIECES pieces become suspects, after all others
                                  └──► MAX_ENDED leaders end while one row runs alone: the row is left out
    all pieces of a shard are answered ──► the shard is put together from their stored answers, alone too

The plan, the completion of the output, and a shard that is put together have no pieces: after MAX_ENDED such ends the
job is paused. Work that ended a leader goes to the end of the queue. So other work runs between two of its runs, and
shows whether gateways end anyway. The end of a leader whose job waited (`JobRecord.trouble`) is charged to nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from sie_bulk_jobs.records import OUTPUT, PLAN, JobRecord, Suspect

MAX_ENDED = 3
PIECES = 16
MAX_SUSPECTS = 48  # work is not split while the record would have more suspects; then it runs again after all others
NAME = 8  # characters of a gateway's name, which ends with random ones, in `Suspect.ended`: the record must stay small
MAX_LEFT_OUT = 8  # largest number of rows that a job leaves out; one more pauses it, so that a job ends few gateways


def claimed_by(job: JobRecord, leader: str) -> JobRecord:
    """Return the record with the new leader `leader`. If it names another leader, that gateway has ended: if a suspect
    ran alone there, and the job did not wait, this end is charged to the suspect.
    """
    if job.leader in ("", leader):
        return replace(job, leader=leader, is_alone=False)
    is_charged = bool(job.suspects) and job.is_alone and job.trouble is None
    job = _charged(job) if is_charged else replace(job, suspects=job.suspects or tuple(_step(job)))
    return replace(job, leader=leader, is_alone=False)


def began(job: JobRecord) -> JobRecord:
    """Return the record when the first suspect begins to run alone."""
    return replace(job, is_alone=True)


def answered(job: JobRecord, *, is_stored: bool) -> JobRecord:
    """Return the record when the first suspect has run alone to its end. `is_stored`: its shard has its record. If not,
    the shard is put together once no piece of it is a suspect.
    """
    first, *rest = job.suspects
    return replace(job, suspects=_followed(first, rest, is_stored=is_stored), is_alone=False)


def left(job: JobRecord, leader: str) -> JobRecord:
    """Return the record of a job that the gateway `leader` gives up. This gateway has not ended: another gateway that
    did not see a renewal of the lease in time may have charged its end to a suspect by mistake.
    """
    suspects = tuple(
        replace(suspect, ended=tuple(name for name in suspect.ended if name != leader[-NAME:]))
        for suspect in job.suspects
    )
    if job.leader == leader:
        return replace(job, leader="", is_alone=False, suspects=suspects)
    return replace(job, suspects=suspects)


def forgiven(suspects: Iterable[Suspect]) -> tuple[Suspect, ...]:
    """Return the suspects of a job that pauses: after it is resumed, each of them runs alone, and the count of ends
    begins again.
    """
    return tuple(replace(suspect, ended=()) for suspect in suspects)


def blamed(job: JobRecord, shard: int | None = None) -> Suspect | None:
    """Return the first suspect if MAX_ENDED gateways ended while it ran alone; else None. With `shard`, return None for
    suspects of other shards.
    """
    for suspect in job.suspects[:1]:
        if len(suspect.ended) >= MAX_ENDED and shard in (None, suspect.shard):
            return suspect
    return None


def _step(job: JobRecord) -> Iterator[Suspect]:
    """Yield the step of a job without suspects whose leader ended. The shards of the leader are unknown here: its
    successor reads the plan, and adds the first unanswered shards.
    """
    if job.finalizing_s:
        yield Suspect(OUTPUT)
    elif not job.is_planned:
        yield Suspect(PLAN)


def _charged(job: JobRecord) -> JobRecord:
    """Return the record after the leader ended while the first suspect ran alone."""
    first, *rest = job.suspects
    if first.rows > 1:
        has_room = len(job.suspects) + PIECES <= MAX_SUSPECTS
        return replace(job, suspects=(*rest, *(_pieces(first) if has_room else (first,))))
    first = replace(first, ended=(*first.ended, job.leader[-NAME:])[-MAX_ENDED:])
    if first.rows == 1 and len(first.ended) == MAX_ENDED and len(job.left_out) < MAX_LEFT_OUT:
        left_out = (*job.left_out, (first.shard, first.first))
        return replace(job, left_out=left_out, suspects=_followed(first, rest, is_stored=False))
    return replace(job, suspects=(*rest, first))


def _pieces(whole: Suspect) -> Iterator[Suspect]:
    size = -(-whole.rows // PIECES)
    end = whole.first + whole.rows
    for first in range(whole.first, end, size):
        yield Suspect(whole.shard, first, min(size, end - first))


def _followed(first: Suspect, rest: list[Suspect], *, is_stored: bool) -> tuple[Suspect, ...]:
    """Return the suspects after `first`. If it was the last piece of a shard, the shard follows."""
    is_last = first.rows > 0 and not is_stored and all(suspect.shard != first.shard for suspect in rest)
    return (*rest, *((Suspect(first.shard),) if is_last else ()))
