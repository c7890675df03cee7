"""A secondary tier of vLLM with its blocks in a kvfuse mount: `KvfuseTier`. See docs/engines-vllm.md."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["KvfuseTier", "register"]


def __getattr__(name: str) -> Any:
    """Loaded when vLLM asks for it: everything else in this package needs no vLLM."""
    if name != "KvfuseTier":
        raise AttributeError(name)
    from kvfuse.connectors.vllm.tier import KvfuseTier

    return KvfuseTier


def register() -> None:
    """A plug-in of vLLM, called in each of its processes: before 0.28 tiers were found by their names alone."""
    from kvfuse.connectors.vllm.config import MODULE, TIER, finds_modules

    if not finds_modules():
        factory = import_module("vllm.v1.kv_offload.tiering.factory").SecondaryTierFactory
        if TIER not in factory._registry:
            factory.register_tier(TIER, MODULE, TIER)
