"""Plug-in of the gateway: the routes of jobs, batches and files, and the service behind them."""

from __future__ import annotations

from sie_bulk_jobs.gateway import assembly, file_routes, job_routes
from sie_gateway.plugin import Plugin

PLUGIN = Plugin(routes=(*file_routes.FILES, *job_routes.JOBS), build=assembly.build)
