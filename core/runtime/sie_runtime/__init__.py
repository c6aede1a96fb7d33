"""Functions that every process of the cluster uses: start, shutdown, logging, HTTP server, reading of the catalogue,
metrics, traces, API keys. It knows no component.
"""
