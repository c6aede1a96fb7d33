"""Structs for the bodies and replies of the routes. The OpenAPI document is generated from these structs."""
