"""Python client of SIE: `SIEClient` and `SIEAsyncClient`."""

from sie_contracts import __version__
from sie_sdk.client import SIEAsyncClient, SIEClient
from sie_sdk.errors import (
    AuthenticationError,
    LoraLoadFailedError,
    LoraLoadingError,
    ModelLoadFailedError,
    ModelLoadingError,
    ModelNotFoundError,
    ProvisioningError,
    QueueFullError,
    RequestError,
    RequestTimeoutError,
    ResourceExhaustedError,
    ServerError,
    SIEConnectionError,
    SIEError,
)
from sie_sdk.types import EncodeResult, ExtractResult, Item, ScoreResult

__all__ = [
    "AuthenticationError",
    "EncodeResult",
    "ExtractResult",
    "Item",
    "LoraLoadFailedError",
    "LoraLoadingError",
    "ModelLoadFailedError",
    "ModelLoadingError",
    "ModelNotFoundError",
    "ProvisioningError",
    "QueueFullError",
    "RequestError",
    "RequestTimeoutError",
    "ResourceExhaustedError",
    "SIEAsyncClient",
    "SIEClient",
    "SIEConnectionError",
    "SIEError",
    "ScoreResult",
    "ServerError",
    "__version__",
]
