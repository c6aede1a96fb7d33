"""Functions that every process of the cluster uses: start and end, logging, HTTP server, reading of the catalogue."""
