"""Vector databases. Each kind has a sink, to which jobs write, and a live collection. A migration replaces the vectors
of a live collection while searches and writers use it.
"""
