"""KV-cache requests: read from a trace, or generated with the statistics of one.

A *request* is a prompt cut into trace blocks of 512 tokens. A block's id stands for its tokens and all that
precede them, so two prompts share exactly the ids of their common prefix; the last block is usually
begun only, and its id is then never seen again.

The generator is a model of one hour of a public chat service's traffic (12,031 requests):

* arrivals come in ticks of three seconds, a Poisson number each;
* every prompt starts with one system block that all share;
* a conversation opens with a prompt of some length and goes on with a probability that grows with its turns
  (who has asked thrice asks again); a prompt of no more than two blocks is a one-off;
* a follow-up comes after some think time, keeps the previous prompt but its unfinished last block, and
  appends a few blocks; one in seven, mostly of long prompts, keeps only its start.

Lengths and times are drawn from the quantiles measured there. ``measure`` gives the figures by which a
generated hour is compared with that one in the tests.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvfuse.errors import ConfigError

TRACE_BLOCK_TOKENS = 512
SYSTEM_BLOCK = 0
DEFAULT_SEED = 20260

TICK_MS = 3000
REQUESTS_PER_TICK = 10.2
PROMPT_BLOCKS_MAX = 247
ONE_OFF_BLOCKS = 2
"""a prompt of so few blocks is never followed up"""

EDITED_SHARE = ((12, 0.02), (24, 0.14), (PROMPT_BLOCKS_MAX + 1, 0.27))
"""of the follow-ups: those that replace most of the previous prompt, where that has fewer blocks than (count, share)"""

CONTINUE = (0.31, 0.46, 0.62, 0.74, 0.82, 0.88, 0.92)
"""probability that turn i is followed by another; the last holds for all later turns. Fitted, not counted: so
few blocks are asked for again, and these so often, as in the trace"""

Quantiles = tuple[tuple[float, float], ...]
"""Points (probability, value) of a distribution; between them it is taken as log-linear."""

OPENING_BLOCKS: Quantiles = (
    (0.0, 2), (0.18, 2), (0.2, 3), (0.3, 4), (0.4, 8), (0.5, 11), (0.6, 15), (0.7, 22),
    (0.8, 31), (0.9, 50), (0.95, 76), (0.99, 176), (1.0, 247),
)  # fmt: skip
"""length of a conversation's first prompt, in trace blocks, system block included"""

APPENDED_BLOCKS: Quantiles = (
    (0.0, 1), (0.3, 1), (0.4, 2), (0.7, 2), (0.8, 4), (0.9, 10), (0.95, 15), (0.99, 40), (1.0, 186),
)  # fmt: skip
"""blocks that a follow-up adds to the prompt that it continues"""

EDITED_KEPT_BLOCKS: Quantiles = ((0.0, 2), (0.2, 2), (0.5, 5), (0.75, 13), (0.9, 30), (1.0, 145))
"""what an edited follow-up keeps of the previous prompt: instructions, say, and another document follows"""

EDITED_APPENDED_BLOCKS: Quantiles = ((0.0, 1), (0.1, 4), (0.25, 12), (0.5, 19), (0.75, 30), (0.9, 39), (1.0, 186))
"""what it adds to them"""

THINK_SECONDS: Quantiles = (
    (0.0, 20), (0.05, 30), (0.1, 42), (0.2, 60), (0.3, 75), (0.4, 96), (0.5, 123), (0.6, 162),
    (0.7, 222), (0.8, 318), (0.9, 483), (0.99, 1477), (1.0, 3030),
)  # fmt: skip
"""from a request to its follow-up"""


class Request(NamedTuple):
    """One prompt."""

    arrival_ms: int
    prompt_tokens: int
    block_ids: tuple[int, ...]


class TrafficFigures(NamedTuple):
    """The hits that a cache of trace blocks that never forgets would have in a run of requests."""

    requests: int
    blocks: int
    hit_ratio: float
    """blocks seen before among all blocks"""
    touched_once: float
    """of the different blocks: those that are never asked for again"""
    hits_per_write: float
    """ideal hit reads to new writes"""
    length_quantiles: tuple[float, float, float, float]
    """trace blocks a prompt has, at 25, 50, 75 and 90 %"""
    reuse_requests_median: float
    """requests between two uses of a prompt's prefix, the system block left out"""


def measure(requests: Iterable[Request]) -> TrafficFigures:
    """The figures of ``requests``, in their order."""
    uses: Counter[int] = Counter()
    last_use: dict[int, int] = {}
    lengths: list[int] = []
    gaps: list[int] = []
    for index, request in enumerate(requests):
        lengths.append(len(request.block_ids))
        prefix = [block for block in request.block_ids if block in last_use and block != SYSTEM_BLOCK]
        if prefix:
            gaps.append(index - last_use[prefix[-1]])
        uses.update(request.block_ids)
        last_use.update(dict.fromkeys(request.block_ids, index))
    if not lengths:
        raise ConfigError("the traffic has no requests")
    blocks, different = uses.total(), len(uses)
    q25, q50, q75, q90 = (float(value) for value in np.quantile(lengths, (0.25, 0.5, 0.75, 0.9)))
    return TrafficFigures(
        requests=len(lengths),
        blocks=blocks,
        hit_ratio=1 - different / blocks,
        touched_once=sum(count == 1 for count in uses.values()) / different,
        hits_per_write=(blocks - different) / different,
        length_quantiles=(q25, q50, q75, q90),
        reuse_requests_median=float(np.median(gaps)) if gaps else 0.0,
    )


class _TraceLine(msgspec.Struct):
    """One line of a trace file; other fields are ignored."""

    timestamp: int
    input_length: int
    hash_ids: list[int]


def read_trace(path: Path) -> Iterator[Request]:
    """The requests of a trace file: JSON lines with ``timestamp`` (ms), ``input_length`` (tokens), ``hash_ids``.

    ConfigError names the line that is no such record.
    """
    decoder = msgspec.json.Decoder(_TraceLine)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = decoder.decode(line)
            except msgspec.DecodeError as error:
                raise ConfigError(f"{path}, line {number}: not a request of a trace: {error}") from error
            yield Request(row.timestamp, row.input_length, tuple(row.hash_ids))


def share_of(requests: Iterable[Request], share: float) -> Iterator[Request]:
    """About ``share`` of the conversations, whole: what one of ``1 / share`` nodes would see.

    Prompts differ in the first block after the system block, so reuse stays within the share while the
    distance to it shrinks with it: a small volume then meets the same hits as a large one with all traffic.
    """
    threshold = int(share * (1 << 32))
    for request in requests:
        root = request.block_ids[min(1, len(request.block_ids) - 1)] if request.block_ids else 0
        if (root * 0x9E3779B1 + 0x7F4A7C15) % (1 << 32) < threshold:
            yield request


class _Draw:
    """Inverse-transform sampling from quantiles, log-linear between the points."""

    def __init__(self, quantiles: Quantiles) -> None:
        self._probabilities: NDArray[np.float64] = np.array([probability for probability, _ in quantiles])
        self._logs: NDArray[np.float64] = np.log([value for _, value in quantiles])

    def __call__(self, random: np.random.Generator) -> float:
        return float(np.exp(np.interp(random.random(), self._probabilities, self._logs)))


@dataclass(order=True)
class _FollowUp:
    """A conversation whose next prompt is due."""

    due_ms: int
    prompt: Sequence[int] = field(compare=False)
    turn: int = field(compare=False)


class Generator:
    """Requests without end; the same seed gives the same ones."""

    def __init__(self, seed: int = DEFAULT_SEED) -> None:
        self._random = np.random.Generator(np.random.PCG64(seed))
        self._opening = _Draw(OPENING_BLOCKS)
        self._appended = _Draw(APPENDED_BLOCKS)
        self._edited_kept = _Draw(EDITED_KEPT_BLOCKS)
        self._edited_appended = _Draw(EDITED_APPENDED_BLOCKS)
        self._think_seconds = _Draw(THINK_SECONDS)
        self._pending: list[_FollowUp] = []
        self._block_count = SYSTEM_BLOCK + 1

    def __iter__(self) -> Iterator[Request]:
        now_ms = 0
        while True:
            for _ in range(self._random.poisson(REQUESTS_PER_TICK)):
                yield self._next(now_ms)
            now_ms += TICK_MS

    def _next(self, now_ms: int) -> Request:
        if self._pending and self._pending[0].due_ms <= now_ms:
            previous = heapq.heappop(self._pending)
            prompt, turn = self._continued(previous.prompt), previous.turn
        else:
            prompt, turn = self._opened(), 0
        if len(prompt) > ONE_OFF_BLOCKS and self._random.random() < CONTINUE[min(turn, len(CONTINUE) - 1)]:
            due_ms = now_ms + int(1000 * self._think_seconds(self._random))
            heapq.heappush(self._pending, _FollowUp(due_ms, prompt, turn + 1))
        # the last block is begun: 1 to 512 of its tokens are there
        tokens = TRACE_BLOCK_TOKENS * (len(prompt) - 1) + int(self._random.integers(1, TRACE_BLOCK_TOKENS + 1))
        return Request(now_ms, tokens, tuple(prompt))

    def _opened(self) -> list[int]:
        return [SYSTEM_BLOCK, *self._new_blocks(round(self._opening(self._random)) - 1)]

    def _continued(self, previous: Sequence[int]) -> list[int]:
        kept = len(previous) - 1
        edited_share = next(share for blocks_max, share in EDITED_SHARE if len(previous) < blocks_max)
        if self._random.random() < edited_share:
            kept = min(kept, round(self._edited_kept(self._random)))
            appended = round(self._edited_appended(self._random))
        else:
            appended = round(self._appended(self._random))
        kept = min(kept, PROMPT_BLOCKS_MAX - 1)
        return [*previous[:kept], *self._new_blocks(min(appended, PROMPT_BLOCKS_MAX - kept))]

    def _new_blocks(self, count: int) -> range:
        first = self._block_count
        self._block_count += count
        return range(first, self._block_count)
