"""A cache of the public certificates. Every httpx client takes 20 ms to read them, although tests speak to no public
server. An import of this module makes a process read them once.
"""

from __future__ import annotations

import functools
import os
import ssl
from pathlib import Path
from typing import Any

import certifi

_FILES = [{"cafile": path} for path in (certifi.where(), os.environ.get("SSL_CERT_FILE")) if path]
_create = ssl.create_default_context
_create_once = functools.cache(_create)


def _context(*args: Any, **options: Any) -> ssl.SSLContext:
    return _create_once(**options) if not args and options in _FILES else _create(*args, **options)


ssl.create_default_context = _context


def certified(folder: Path, name: str) -> Path:
    """Create a key and a self-signed certificate for the name, in one file."""
    from datetime import UTC, datetime, timedelta

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, named = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(
            named, named, key.public_key(), x509.random_serial_number(), now, now + timedelta(days=1)
        )
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    plain = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "certificate.pem").write_bytes(plain + certificate.public_bytes(pem))
    return folder / "certificate.pem"
