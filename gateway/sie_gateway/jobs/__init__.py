"""Jobs: work on whole files that outlives a request, and the files that it reads and writes.

    POST /v1/jobs, /v1/batches ──► JobService ──► JobLedger: a record in the broker ──► JobScheduler of every gateway
    JobScheduler: takes the lease of a job ──► JobRun: plan ─► shards ─► manifest
    a shard: rows ─► equal ones once ─► cache ─► groups by length ─► JobClient ─► one object, created once ─► its record

A shard's object has a name that follows from its number, and is only ever created, never replaced. So whichever
gateway wrote it, and however often one died on the way, each row is in the output exactly once. The record of a shard
is written after its object: a leader that finds the object without a record reads it and writes the record.

records.py, ledger.py        the buckets of jobs, files and shards
files.py, file_routes.py     files: bytes in the payload store, uploaded as forms
job_routes.py, service.py    the routes of jobs, and what they do
results.py                   the output of a job as its routes read it
scheduler.py, run.py         the leader of a job; the life of a job: shards, retries, manifest
engine.py, assembly.py       the parts that a job is made of; those of a gateway
native.py, lines.py          the two kinds: rows of data sets, requests in OpenAI's form
envelope.py                  the lines of these requests and of their replies
values.py, client.py         equal inputs once, groups by length; requests that wait for capacity
storage.py, cache.py         objects of one job; vectors that later jobs take over
pace.py                      forecast, times of the day
"""
