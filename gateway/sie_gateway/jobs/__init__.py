"""Jobs: work on whole files that outlives a request, and the files that it reads and writes.

    POST /v1/jobs, /v1/batches ──► JobService ──► JobLedger: a record in the broker ──► Keeper of every gateway
    JobScheduler: takes the lease of a job ──► JobRun: plan ─► shards ─► manifest
    a shard: rows ─► equal ones once ─► cache ─► groups by length ─► Asking ─► one object, created once ─► its record

A shard's object has a name that follows from its number, and is only ever created, never replaced. So whichever
gateway wrote it, and however often one died on the way, each row is in the output exactly once. The record of a shard
is written after its object: a leader that finds the object without a record reads it and writes the record.

records.py, ledger.py    the buckets of jobs, files and shards
files.py, form.py        files: bytes in the payload store, uploaded as forms
service.py, results.py   what clients ask of jobs, and what they read of their output
keeper.py, run.py        who leads a job; its life
engine.py                what a job is made of
native.py, lines.py      the two kinds: rows of data sets, requests in OpenAI's form
envelope.py              the lines of these requests and of their answers
values.py, asking.py     equal inputs once, groups; requests that wait for capacity
cache.py                 answers that later jobs take over
pace.py, windows.py      forecast, times of the day
"""
