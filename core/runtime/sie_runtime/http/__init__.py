"""HTTP servers of every process: bounds on slow and large requests, origins, routes and their OpenAPI document."""
