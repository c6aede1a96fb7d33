"""The HTTP edge of the cluster: names, validation, routing, publishing, collecting. No model code, no torch."""
