"""How far a prefix can be restored, beside the same said plainly; keys of pages. Needs no engine."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest

from kvfuse.connectors.sglang import identity, policies


def test_prefixes_by_policy() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(500):
        pages = [rng.random() < 0.7 for _ in range(rng.randrange(12))]
        trailing = rng.randrange(5)
        found = np.array(pages, np.bool_)
        every = [all(pages[:length]) for length in range(1, len(pages) + 1)]
        ends = [all(pages[max(0, length - max(trailing, 1)) : length]) for length in range(1, len(pages) + 1)]
        assert policies.restorable_lengths(found, policies.ALL_PAGES, trailing).tolist() == every
        assert policies.restorable_lengths(found, policies.TRAILING_PAGES, trailing).tolist() == ends
        assert policies.leading(found) == sum(every)
        assert policies.longest(np.array(ends, np.bool_)) == max(
            (n + 1 for n, end in enumerate(ends) if end), default=0
        )


def test_groups_that_are_whole() -> None:
    transfer = SimpleNamespace(group_pages=2, block_pages=8)
    for pages, covered in (([], 0), ([1], 0), ([1, 1, 1], 8), ([1, 1, 1, 1], 16), ([1, 1, 0, 1, 1, 1], 8), ([0, 1], 0)):
        assert policies.group_pages(np.array(pages, np.bool_), transfer) == covered
    assert policies.group_pages(np.ones(4, np.bool_), SimpleNamespace(group_pages=0, block_pages=8)) == 0


def test_a_policy_that_nobody_knows() -> None:
    with pytest.raises(ValueError, match="hit policy"):
        policies.restorable_lengths(np.ones(1, np.bool_), "some_pages", 1)


def test_keys_have_one_length() -> None:
    tags = [identity.part_tag("kv", "page_first", part, "tp0/2") for part in "01"]
    keys = {identity.page_name(name) + tag for name in ("ab" * 32, "short", "x" * 300) for tag in tags}
    assert len(keys) == 6
    assert {len(key) for key in keys} == {identity.HASH_DIGITS + 1 + 2 * identity.TAG_SIZE}


def test_ranks_in_keys() -> None:
    config = SimpleNamespace(
        tp_rank=1, tp_size=2, pp_rank=0, pp_size=1, attn_cp_rank=1, attn_cp_size=4, dcp_rank=0, dcp_size=1
    )
    assert identity.shard_name(config, is_replicated=False) == "tp1/2,attn_cp1/4"
    assert identity.shard_name(config, is_replicated=True) == "attn_cp1/4"
    assert identity.shard_name(config, is_replicated=False, heads=(5, 8)) == "tp5/8,attn_cp1/4"


def test_what_weights_and_numbers_are() -> None:
    settings = {"model_path": f"/models/snapshots/{'a1' * 20}/", "quantization": "fp8", "kv_cache_dtype": "fp8_e5m2"}
    assert identity._weights(settings) == "a1" * 20 + "/fp8"
    assert identity._weights({"revision": "main"}) == "main"
    assert identity._dtype(SimpleNamespace(dtype="torch.uint8"), settings) == "uint8/fp8_e5m2"
    assert identity._dtype(SimpleNamespace(dtype="torch.bfloat16"), settings) == "bfloat16"
