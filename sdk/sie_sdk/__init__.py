"""Python client of SIE: `SIEClient` and `SIEAsyncClient`."""

from sie_contracts import __version__
from sie_sdk.client import SIEAsyncClient, SIEClient
from sie_sdk.errors import (
    AuthenticationError,
    ModelLoadingError,
    ModelNotFoundError,
    QueueFullError,
    RequestError,
    RequestTimeoutError,
    ResourceExhaustedError,
    ServerError,
    SIEConnectionError,
    SIEError,
)
from sie_sdk.types import EncodeResult, Item

__all__ = [
    "AuthenticationError",
    "EncodeResult",
    "Item",
    "ModelLoadingError",
    "ModelNotFoundError",
    "QueueFullError",
    "RequestError",
    "RequestTimeoutError",
    "ResourceExhaustedError",
    "SIEAsyncClient",
    "SIEClient",
    "SIEConnectionError",
    "SIEError",
    "ServerError",
    "__version__",
]
