"""Whether other hosts would find this one where it says that it answers them: for `kvfuse doctor`."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

from kvfuse.cli.findings import MISSING, OK, WARN, Finding
from kvfuse.options.options import PeerOptions
from kvfuse.peer.service import addresses_of

CONNECT_SECONDS = 2.0


def check_peers(options: PeerOptions) -> Iterator[Finding]:
    """As this host itself sees it: its names have to be known here, and their addresses to be its own."""
    if options.listen is None:
        return
    host, port = _parts(options.listen)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, dualstack_ipv6=host == "::")
    except OSError as error:
        if error.errno != errno.EADDRINUSE:  # a mount listens there: then that is reached
            yield Finding("peer.listen", MISSING, f"nobody can listen at {options.listen}: {error.strerror or error}",
                          "name an address of this host")  # fmt: skip
            return
        listening = socket.socket()
    with listening:
        for address in addresses_of(options):
            try:
                socket.create_connection(_parts(address), CONNECT_SECONDS).close()
            except OSError as error:
                problem = f"other hosts are told {address}, which cannot be reached: {error.strerror or error}"
                yield Finding("peer.listen", WARN, problem, "set peer.advertise, or have that name resolved")
            else:
                yield Finding("peer.listen", OK, f"{address} can be reached from here")


def _parts(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
