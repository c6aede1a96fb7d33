"""`sie airgap`: models for a site without a network, in one file."""

from sie_cli.airgap.command import airgap

__all__ = ["airgap"]
