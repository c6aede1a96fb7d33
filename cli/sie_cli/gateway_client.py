"""Client of the gateway for commands. It ends the command if the gateway does not answer."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sie_cli.cluster import Cluster
from sie_cli.display import printable
from sie_cli.options import refuse
from sie_cli.refusal import CommandRefused

if TYPE_CHECKING:
    from sie_client import SIEClient


@contextlib.contextmanager
def gateway_client(cluster: Cluster, scopes: str, *, is_patient: bool = False) -> Iterator[SIEClient]:
    """Open a client for a command that needs a token with these scopes; errors are handled as in `gateway_errors`. A
    patient client waits while the gateway restarts, any other only as long as a `sie serve` may be starting.
    """
    from sie_client import SIEClient

    secret = cluster.gateway_token
    with (
        gateway_errors(cluster, scopes),
        SIEClient(
            cluster.gateway_urls[0],
            api_key=secret.reveal() if secret else None,
            connection_budget_s=None if is_patient else cluster.first_patience_s,
        ) as client,
    ):
        yield client


@contextlib.contextmanager
def gateway_errors(cluster: Cluster, scopes: str) -> Iterator[None]:
    """End the command with status 2 if no gateway answers or if it refuses the token. Convert other errors of the
    client to CommandRefused.
    """
    from sie_client.errors import AuthenticationError, ModelNotFoundError, SIEConnectionError, SIEError

    try:
        yield
    except AuthenticationError as error:
        refuse(printable(f"{error}: set SIE_API_KEY to a token with {scopes}"))
    except SIEConnectionError as error:
        refuse(printable(cluster.without_gateway(cluster.gateway_urls[0], error)))
    except ModelNotFoundError as error:
        raise CommandRefused(f"{printable(str(error))} (`sie models list` shows all)") from error
    except SIEError as error:
        raise CommandRefused(printable(str(error))) from error


@contextlib.contextmanager
def quiet_client() -> Iterator[None]:
    """Hide the client's warnings about retries: they would disturb the display, and the last error has the reason."""
    logger = logging.getLogger("sie_client")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
