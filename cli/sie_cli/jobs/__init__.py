"""`sie jobs`: commands for jobs, which run a model on every row of files.

command  the commands
job      a job: the request that starts it, its progress, its state in words
"""

from sie_cli.jobs.command import jobs

__all__ = ["jobs"]
