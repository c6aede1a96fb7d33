"""Jobs, which work on whole files and continue after the request that submitted them, and the files of jobs.

    POST /v1/jobs, /v1/batches ──► JobService ──► JobLedger: a record in the broker ──► JobScheduler of every gateway
    JobScheduler: acquires the lease of a job ──► JobRun: plan ─► shards ─► manifest
    a shard: rows ─► each distinct row once ─► cache ─► groups by length ─► JobClient
             ─► one object, created once ─► its record

A shard is a number of consecutive rows of the input whose answers are written as one object. The name of the object
follows from the number of the shard. The object is created once and never replaced. So each row is in the output
exactly once, even if a gateway was killed while it led the job. The record of a shard is written after its object: a
leader that finds the object without a record reads the object and writes the record.

records.py, ledger.py        the buckets of jobs, files and shards
files.py                     files: their records; their bytes are in the payload store
file_routes.py               the routes of files, which are uploaded as forms
slots.py                     bounds of what runs at once
job_routes.py, service.py    the routes of jobs, and the operations behind them
results.py                   the output of a job, for the routes that return it
scheduler.py                 the choice of one gateway (leader) for each job
run.py                       the run of a job by its leader: shards, retries, manifest
suspects.py                  the search for the rows that end gateways
engine.py, assembly.py       construction of one job; construction of a gateway's objects for jobs
native.py, lines.py          the two kinds of jobs: rows of data sets, requests in OpenAI's form
envelope.py                  the lines of a batch: requests and replies
values.py                   computation of each distinct input once, in requests of inputs of similar lengths; the texts
                             of documents, which are parsed before their chunks are encoded
client.py                    requests of a job, which wait while there is no capacity
storage.py                   the plan of a job and the parts of a batch in the payload store
segments.py                  the answers of earlier jobs in the payload store
pace.py                      rate and forecast of a job; the times of day at which it may run
"""
