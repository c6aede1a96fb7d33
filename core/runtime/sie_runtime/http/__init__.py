"""HTTP server of every process: limits on slow and large requests, checks of origins, routes and their OpenAPI
document.
"""
