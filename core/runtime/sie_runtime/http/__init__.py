"""HTTP server of every process: limits on slow and large requests, checks of the origin of browser requests, routes,
and the OpenAPI document.
"""
