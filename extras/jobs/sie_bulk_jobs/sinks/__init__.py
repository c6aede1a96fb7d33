"""Vector databases. Each kind has a sink, to which jobs write, and a live collection. A migration replaces the vectors
of a live collection while searches and writers use it.

A new database is a sink and a `LiveCollection` in files of this folder, its scheme in `opening`, and an `Application`
in `extras/jobs/tests/live_application`, by which the contract and system tests run all their cases.
"""
