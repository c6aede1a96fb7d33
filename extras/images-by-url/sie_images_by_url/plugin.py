"""Plug-in of the gateway: the fetcher of the images at URLs."""

from __future__ import annotations

from sie_gateway.plugin import Plugin, PluginContext, Service
from sie_images_by_url import fetcher
from sie_images_by_url.settings import ImageUrlSettings


def build(context: PluginContext) -> Service:
    """Let the gateway fetch from the hosts of the settings."""
    assert isinstance(context.settings, ImageUrlSettings), "the table of settings has the rows of this package"
    fetches = context.metrics.make.counters("sie_gateway_image_fetches")
    for result in fetcher.RESULTS:
        fetches.labels(result)

    def count(result: str) -> None:
        fetches.labels(result).inc()

    context.inference.use_fetcher(fetcher.ImageUrls(context.settings.image_url_hosts, count, fetcher.NETWORK))
    return Service()


PLUGIN = Plugin(build=build)
