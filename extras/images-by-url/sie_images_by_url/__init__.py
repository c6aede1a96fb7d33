"""Images at URLs: the gateway fetches them from hosts that the operator names.

fetcher.py   the rules, and the fetch
plugin.py    the part of a gateway
settings.py, metrics.py    rows of the tables that all processes read
"""
