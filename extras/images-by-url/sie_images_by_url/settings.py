"""Setting of the images at URLs."""

from __future__ import annotations

from dataclasses import dataclass

from sie_contracts.settings.rows import row
from sie_contracts.settings.values import HOSTS


@dataclass(frozen=True, kw_only=True, repr=False)
class ImageUrlSettings:
    image_url_hosts: tuple[str, ...] | None = row(
        None,
        "gateway",
        HOSTS,
        "Hosts from which the gateway fetches images whose URLs a request names. A name without a port allows the ports 80 and 443. `*` allows any name. Addresses that are not public are never fetched from. Unset: nothing is fetched.",
    )
