"""Command `sie bench`: run a recorded trace through the scheduler in virtual time."""
