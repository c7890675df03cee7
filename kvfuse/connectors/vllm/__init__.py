"""A secondary tier of vLLM with its blocks in a kvfuse mount: `KvfuseTier`. See docs/engines-vllm.md."""

from __future__ import annotations

from typing import Any

__all__ = ["KvfuseTier"]


def __getattr__(name: str) -> Any:
    """Loaded when vLLM asks for it: everything else in this package needs no vLLM."""
    if name != "KvfuseTier":
        raise AttributeError(name)
    from kvfuse.connectors.vllm.tier import KvfuseTier

    return KvfuseTier
