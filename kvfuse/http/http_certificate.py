"""The certificate of a door, which is read again when it is renewed."""

from __future__ import annotations

import logging
import ssl
from functools import partial
from pathlib import Path

import trio

from kvfuse.errors import ConfigError
from kvfuse.options.secret_files import check_private, identity_of

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""between two looks at the files"""


class HttpCertificate:
    """A certificate with those that signed it, and its key: two files in PEM, or twice the same one."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """ConfigError where they cannot be used."""
        self._files = certificate, key
        self._seen = self._look()
        self.context = _load(certificate, key)
        """of connections that begin now"""

    async def follow(self) -> None:
        """Read the files again whenever they change, until cancelled. While they do not fit, the former ones hold."""
        while True:
            await trio.sleep(LOOK_SECONDS)
            seen = await trio.to_thread.run_sync(self._look, abandon_on_cancel=True)
            if seen == self._seen:
                continue
            self._seen = seen
            try:
                self.context = await trio.to_thread.run_sync(partial(_load, *self._files), abandon_on_cancel=True)
                log.info("the certificate %s is renewed", self._files[0])
            except ConfigError as error:
                log.error("the former certificate is still used: %s", error)

    def _look(self) -> tuple[object, ...]:
        return tuple(map(identity_of, self._files))


def _load(certificate: Path, key: Path) -> ssl.SSLContext:
    """ConfigError."""
    check_private(key, "http.key")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key)
    except OSError as error:
        raise ConfigError(f"http.certificate, http.key: {certificate}, {key}: {error}") from error
    return context
