"""Vector databases. For each kind there is a sink, to which jobs write, and a live collection, whose vectors are
replaced while it is in use.
"""
