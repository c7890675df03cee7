"""Hosts that read from each other by RDMA. In the machine of scripts/rdma-vm, where `test_rdma` runs this.

`test_peer_links` has more of that, without devices.
"""

from __future__ import annotations

import pytest
from link_lab import KIB, MIB, LinkedPair, linked

from kvfuse.peer import service as service_module


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads have until their deadline: an emulated machine is no slow host."""
    monkeypatch.setattr(service_module, "LATE_MIN", 20.0)


async def read_by_one_batch(pair: LinkedPair, inos: list[int]) -> None:
    """One READ for each block, and one completion."""
    pair.memory[:] = 0
    before = pair.rdma
    assert all(await pair.read(inos))
    after = pair.rdma
    found = {name: after[name] - before[name] for name in ("reads", "batches", "completions", "bytes")}
    size = sum(len(pair.writer.hood.blocks[ino]) for ino in inos)
    assert found == {"reads": len(inos), "batches": 1, "completions": 1, "bytes": size}


async def test_a_batch_is_one_list_of_reads_and_one_completion() -> None:
    async with linked() as pair:
        for count, size in ((128, 4 * KIB), (32, 64 * KIB), (6, MIB), (2, 4 * MIB)):
            inos = pair.put([size] * count)
            await pair.until_by_rdma(inos)
            await read_by_one_batch(pair, inos)
        print(pair.rdma)
