"""LMCache: an L2 adapter for its server, and a remote connector for engines that have it in their own process.

See docs/engines-lmcache.md.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KvfuseConnector", "KvfuseConnectorAdapter", "KvfuseL2Adapter"]


def __getattr__(name: str) -> Any:
    """The classes, which need LMCache."""
    if name == "KvfuseL2Adapter":
        from kvfuse.connectors.lmcache.server import KvfuseL2Adapter

        return KvfuseL2Adapter
    if name in ("KvfuseConnector", "KvfuseConnectorAdapter"):
        from kvfuse.connectors.lmcache import remote

        return getattr(remote, name)
    raise AttributeError(f"{__name__} has no {name}")
