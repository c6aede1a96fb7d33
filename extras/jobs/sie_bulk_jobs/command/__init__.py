"""`sie jobs`: commands for jobs, which run a model on every row of files.

command  the commands
job      a job: the request that starts it, its progress, its state in words
"""

from sie_bulk_jobs.command.command import jobs

__all__ = ["jobs"]
