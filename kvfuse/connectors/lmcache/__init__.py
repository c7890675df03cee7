"""LMCache: an L2 adapter for its server, and a remote connector for engines that have it in their own process.

See docs/engines-lmcache.md.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KvfuseConnector", "KvfuseConnectorAdapter", "KvfuseL2Adapter"]


def __getattr__(name: str) -> Any:
    """The classes, which need LMCache."""
    if name not in __all__:
        raise AttributeError(f"{__name__} has no {name}")
    from kvfuse.connectors.engine import load_class

    module = "server" if name == "KvfuseL2Adapter" else "remote"
    return load_class("lmcache", f"kvfuse.connectors.lmcache.{module}", name)
