"""HTTP server of every process: limits on slow and large requests, origin checks, routes, and the OpenAPI document."""
