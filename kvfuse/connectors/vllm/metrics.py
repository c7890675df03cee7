"""Counters of the tier as vLLM publishes them: Prometheus counters of its own endpoint. See docs/engines-vllm.md."""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from typing import Any

from kvfuse.connectors.steady_store import SteadyStore
from kvfuse.connectors.vllm.transfers import Transfers

PREFIX = "vllm:kvfuse_"
MEANINGS = {
    "loaded": "Chunks loaded from kvfuse.",
    "load_missed": "Chunks that were found, and could not be loaded whole and in time.",
    "stored": "Chunks stored in kvfuse.",
    "store_known": "Chunks that were there already, and not stored again.",
    "store_failed": "Chunks that were not stored: not admitted, no room, too late or no daemon.",
    "store_shed": "Chunks not stored because too many waited to be stored.",
    "lookup_late": "Chunks whose look-up took longer than the deadline: misses.",
    "lookup_too_slow": "Chunks that are there, and would come later than computing them takes: misses.",
    "failure_away": "Chunks asked for, got or put while no daemon was there.",
    "failure_deadline": "Chunks asked for, got or put that the daemon did not serve within the deadline.",
}
"""by name; the unit is chunks"""


def definitions() -> dict[str, Any]:
    counter = import_module("vllm.v1.kv_offload.base").OffloadingCounterMetadata
    return {PREFIX + name: counter(documentation=meaning) for name, meaning in MEANINGS.items()}


class Stats:
    """What was counted since vLLM asked last."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        """what vLLM has been told"""
        self._counted: Counter[str] = Counter()

    def count(self, name: str, count: int) -> None:
        self._counted[name] += count

    def take(self, transfers: Transfers, store: SteadyStore) -> Any:
        """vLLM's own kind of statistics; None: nothing has changed."""
        failures = store.counters.failures
        now = self._counted + transfers.counts
        now |= Counter({f"failure_{reason}": failures[reason] for reason in ("away", "deadline")})
        new = {name: count - self.seen[name] for name, count in now.items() if count > self.seen[name]}
        if not new:
            return None
        self.seen = now
        module = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics"
        stats = import_module(module).OffloadingConnectorStats()
        for name, count in new.items():
            stats.increase_counter(PREFIX + name, count)
        return stats
