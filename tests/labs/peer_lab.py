"""Hosts that read from each other."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Of the loopback device; nobody had it a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])
