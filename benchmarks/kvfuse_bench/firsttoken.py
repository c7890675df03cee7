"""Time to first token: what an engine loads of a prompt, and what is left to compute. A model, without queues."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvfuse_bench.traffic import Request


class PromptEngine(NamedTuple):
    """An engine beside a cache."""

    prefill: float
    """tokens a second that it computes"""
    token_size: int
    """bytes of the KV values of a token"""
    load_rate: float
    """bytes a second that the cache brings"""

    def computed(self, prompt_tokens: int) -> float:
        """Seconds to the first token where nothing is cached."""
        return prompt_tokens / self.prefill

    def seconds(self, prompt_tokens: int, hit_tokens: int) -> float:
        """Seconds to the first token where the cache has the first ``hit_tokens``.

        The last token is always computed. Hits that load slower than they compute are computed.
        """
        left = max(1, prompt_tokens - hit_tokens)
        return min(self.computed(prompt_tokens), hit_tokens * self.token_size / self.load_rate + left / self.prefill)


class FirstTokens(NamedTuple):
    """Of the requests of one run, in seconds."""

    mean: float
    saved: float
    """by all of them together, beside an engine that computes everything"""


def first_tokens(
    engine: PromptEngine, requests: Sequence[Request], hits: Iterable[int], block_tokens: int
) -> FirstTokens:
    """``hits``: of each request, in blocks of ``block_tokens``."""
    tokens = [request.prompt_tokens for request in requests]
    times = [engine.seconds(count, hit * block_tokens) for count, hit in zip(tokens, hits, strict=True)]
    return FirstTokens(sum(times) / len(times), sum(map(engine.computed, tokens)) - sum(times))
