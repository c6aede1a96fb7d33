"""Rows of this extra in the tables of routes (`of_extras`)."""

DOCUMENTED = """
    read   GET /v1/cluster /v1/placement /v1/history
    read   GET /v1/requests /v1/requests/{request} /v1/requests/{request}/log
    read   GET /console/configs/org/name/history
    config POST /console/configs /console/configs/org/name/rollback
    config PUT /console/configs/org/name
    config PATCH /console/configs/org/name
    config DELETE /console/configs/org/name
    open   GET / /console/mine
"""
OWNED = """
    GET    /v1/requests/{request}
"""
SHOWS = """
    GET    /v1/cluster /v1/requests /v1/requests/{request}/log
"""
SILENT = """
    GET    /console/configs/{id:path}/history
    POST   /console/configs /console/configs/{id:path}/rollback
    PUT    /console/configs/{id:path}
    PATCH  /console/configs/{id:path}
    DELETE /console/configs/{id:path}
    GET    /v1/placement /v1/history / /console/{file}
"""
