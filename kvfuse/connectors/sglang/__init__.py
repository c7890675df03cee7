"""SGLang: a `dynamic` backend of its hierarchical cache, ``KvfuseHiCache``. See docs/engines-sglang.md."""

from __future__ import annotations

from typing import Any

__all__ = ["KvfuseHiCache"]


def __getattr__(name: str) -> Any:
    """The backend's class, which needs SGLang."""
    if name == "KvfuseHiCache":
        from kvfuse.connectors.engine import load_class

        return load_class("sglang", "kvfuse.connectors.sglang.backend", name)
    raise AttributeError(f"{__name__} has no {name}")
