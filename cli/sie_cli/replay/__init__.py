"""Command `sie bench`: a recorded trace runs through the scheduler in virtual time."""
