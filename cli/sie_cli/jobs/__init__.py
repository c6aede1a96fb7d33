"""`sie jobs`: work on whole files.

command    the commands
submitting what `submit` sends, from its options
following  a job's progress, in a terminal and in a pipe
told       a job in words
"""

from sie_cli.jobs.command import jobs

__all__ = ["jobs"]
