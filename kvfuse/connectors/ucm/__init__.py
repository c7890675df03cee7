"""UCM (unified cache management): a store of its `UcmKVStoreBaseV1`, ``KvfuseStore``. See docs/engines-ucm.md."""

from __future__ import annotations

from typing import Any

__all__ = ["KvfuseStore"]


def __getattr__(name: str) -> Any:
    """The store's class, which needs UCM."""
    if name == "KvfuseStore":
        from kvfuse.connectors.engine import load_class

        return load_class("ucm", "kvfuse.connectors.ucm.store", name)
    raise AttributeError(f"{__name__} has no {name}")
