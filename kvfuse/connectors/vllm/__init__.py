"""A secondary tier of vLLM with its blocks in a kvfuse mount: `KvfuseTier`. See docs/engines-vllm.md."""

from __future__ import annotations

import logging
from importlib import import_module
from traceback import format_exception_only
from typing import Any

__all__ = ["KvfuseTier", "register"]

log = logging.getLogger("vllm.kvfuse")  # vLLM shows what its own loggers and those below say


def __getattr__(name: str) -> Any:
    """Loaded when vLLM asks for it: everything else in this package needs no vLLM."""
    if name != "KvfuseTier":
        raise AttributeError(name)
    from kvfuse.connectors.engine import load_class

    return load_class("vllm", "kvfuse.connectors.vllm.secondary_tier", name)


def register() -> None:
    """A plug-in of vLLM, called in each of its processes, whether kvfuse is used or not: it never raises.

    Before 0.28 vLLM found tiers by their names alone; for others there is nothing to do.
    """
    try:
        _register()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # what imports of a broken installation raise: SystemExit, too
        log.warning(
            "kvfuse registers nothing with vLLM, which goes on without it: %s. Where KvfuseTier is to be used, run "
            "'kvfuse connectors check vllm' in this environment.", " ".join(format_exception_only(error)[-1].split()),
        )  # fmt: skip


def _register() -> None:
    from kvfuse.connectors.vllm.config import MODULE, TIER, check_engine, finds_modules

    if finds_modules():
        for advice in check_engine():
            log.warning("kvfuse registers nothing with vLLM: %s", advice)
        return
    factory = import_module("vllm.v1.kv_offload.tiering.factory").SecondaryTierFactory
    if TIER not in factory._registry:
        factory.register_tier(TIER, MODULE, TIER)
