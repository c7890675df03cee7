"""The traffic generator against the figures of the hour it was fitted to, and the readers of traces."""

from __future__ import annotations

import json
from itertools import islice, pairwise
from pathlib import Path

import pytest

from kvfuse.errors import ConfigError
from kvfuse_bench.models import MODELS
from kvfuse_bench.replay import ReplayPlan, engine_keys
from kvfuse_bench.traffic import (
    DEFAULT_SEED,
    PROMPT_BLOCKS_MAX,
    SYSTEM_BLOCK,
    TRACE_BLOCK_TOKENS,
    Generator,
    Request,
    TrafficFigures,
    measure,
    read_trace,
    share_of,
)

FITTED = TrafficFigures(
    requests=12_031,
    blocks=288_500,
    hit_ratio=0.366,
    touched_once=0.758,
    hits_per_write=0.578,
    length_quantiles=(5, 14, 31, 54),
    reuse_requests_median=422,
)
"""the hour of traffic that the generator was fitted to"""

HOUR_MS = 3_537_000

REQUESTS = [
    Request(0, 700, (0, 1)),
    Request(3000, 1500, (0, 2, 3)),
    Request(3000, 1600, (0, 2, 3, 4)),
    Request(6000, 600, (0, 5)),
]


def hour(seed: int) -> list[Request]:
    return list(islice(Generator(seed), FITTED.requests))


@pytest.mark.parametrize("seed", [DEFAULT_SEED, 1, 2, 3])
def test_a_generated_hour_is_like_the_measured_one(seed: int) -> None:
    requests = hour(seed)
    figures = measure(requests)
    assert figures.blocks == pytest.approx(FITTED.blocks, rel=0.12)
    assert figures.hit_ratio == pytest.approx(FITTED.hit_ratio, abs=0.03)
    assert figures.touched_once == pytest.approx(FITTED.touched_once, abs=0.03)
    assert figures.hits_per_write == pytest.approx(FITTED.hits_per_write, abs=0.06)
    assert figures.length_quantiles == pytest.approx(FITTED.length_quantiles, rel=0.2)
    assert figures.reuse_requests_median == pytest.approx(FITTED.reuse_requests_median, rel=0.15)
    assert requests[-1].arrival_ms == pytest.approx(HOUR_MS, rel=0.05)


def test_the_seed_alone_decides() -> None:
    first, again, other = (list(islice(Generator(seed), 500)) for seed in (5, 5, 6))
    assert first == again
    assert first != other


def test_generated_prompts_are_whole_prefix_chains() -> None:
    """A block's id stands for all that precedes it: it is always found behind the same block."""
    before: dict[int, int] = {}
    for request in hour(DEFAULT_SEED):
        ids = request.block_ids
        assert ids[0] == SYSTEM_BLOCK
        assert 2 <= len(ids) <= PROMPT_BLOCKS_MAX
        assert len(ids) == -(-request.prompt_tokens // TRACE_BLOCK_TOKENS)
        for previous, block in pairwise(ids):
            assert before.setdefault(block, previous) == previous


def test_figures_of_a_few_requests() -> None:
    figures = measure(REQUESTS)
    # 11 blocks, of which 0 (three times), 2 and 3 are hits; 1, 4 and 5 are touched once
    assert figures.hit_ratio == pytest.approx(5 / 11)
    assert figures.touched_once == pytest.approx(3 / 6)
    assert figures.hits_per_write == pytest.approx(5 / 6)
    assert figures.reuse_requests_median == 1


def test_no_requests_have_no_figures() -> None:
    with pytest.raises(ConfigError, match="no requests"):
        measure([])


def test_a_trace_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": row.arrival_ms, "input_length": row.prompt_tokens, "output_length": 1, "hash_ids": row.block_ids}
        for row in REQUESTS
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert list(read_trace(file)) == REQUESTS


@pytest.mark.parametrize("line", ["", "[]", "{", '{"timestamp": 0, "input_length": "many", "hash_ids": []}'])
def test_a_bad_line_of_a_trace_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "trace.jsonl"
    good = '{"timestamp": 0, "input_length": 5, "hash_ids": [0]}'
    file.write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(ConfigError, match=r"trace.jsonl, line 2"):
        list(read_trace(file))


def test_a_share_keeps_conversations_whole() -> None:
    requests = hour(DEFAULT_SEED)
    kept = list(share_of(requests, 0.2))
    roots = {request.block_ids[1] for request in kept}
    assert kept == [request for request in requests if request.block_ids[1] in roots]
    assert len(kept) == pytest.approx(0.2 * len(requests), rel=0.15)
    assert measure(kept).hit_ratio == pytest.approx(FITTED.hit_ratio, abs=0.1)
    assert list(share_of(requests, 1.0)) == requests


def test_a_prompt_becomes_the_blocks_of_an_engine() -> None:
    plan = ReplayPlan("llama-3-8b", 16, 2 << 20)
    keys = list(engine_keys(Request(0, 512 + 16 * 3 + 5, (0, 9)), plan))
    assert len(keys) == len(set(keys)) == 32 + 3, "an unfinished block is not kept"
    longer = list(engine_keys(Request(1, 1024 + 100, (0, 9, 10)), plan))
    assert longer[: len(keys)] == keys, "a longer prompt begins with the blocks of its prefix"
    other = list(engine_keys(Request(0, 565, (0, 9)), ReplayPlan("llama-3-70b", 16, 2 << 20)))
    assert not set(keys) & set(other), "models share no blocks"


@pytest.mark.parametrize(
    ("model", "tokens", "size"),
    [
        ("llama-3-8b", 16, 2 << 20),
        ("llama-3-70b", 16, 5 << 20),
        ("qwen2.5-7b", 16, 896 << 10),
        ("deepseek-v3", 64, 61 * 576 * 2 * 64),
    ],
)
def test_block_sizes_of_models(model: str, tokens: int, size: int) -> None:
    assert MODELS[model].block_size(tokens) == size
