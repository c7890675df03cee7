"""vLLM's TieringOffloadingSpec on its CPU platform, for `vllm_cpu_engine`. Runs in the engine's own Python.

vLLM has no such spec, as nobody offloads from a CPU. What is replaced is the copy between "device" and host alone:
memcpy between vLLM's own KV tensors and the rows of its shared region. Tiers, scheduler and keys are vLLM's own.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

import numpy as np
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.gpu_worker import compute_sub_block_ptrs
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class Copies:
    """From the tensors to the region, or back. ``chunk_blocks``: blocks of the engine in one row of the region."""

    def __init__(self, tensors: list[Any], region: list[Any], chunk_blocks: int, refs: Any, to_region: bool) -> None:
        self._source, self._target = (tensors, region) if to_region else (region, tensors)
        self._source_blocks, self._target_blocks = (1, chunk_blocks) if to_region else (chunk_blocks, 1)
        self._refs, self._to_region = refs, to_region

    def run(self, source: Any, target: Any) -> int:
        """Bytes that were copied."""
        engine = source if self._to_region else target
        source_start = target_start = total = 0
        for group, (size, index) in enumerate(zip(engine.group_sizes, engine.block_indices, strict=True)):
            if not size:
                continue
            source_skip, target_skip = index % self._source_blocks, index % self._target_blocks
            source_end = source_start + cdiv(size + source_skip, self._source_blocks)
            target_end = target_start + cdiv(size + target_skip, self._target_blocks)
            for ref in self._refs[group]:
                read, written = np.empty(size, np.uint64), np.empty(size, np.uint64)
                for ids, blocks, pointers, tensor, skip in (
                    (source.block_ids[source_start:source_end], self._source_blocks, read, self._source, source_skip),
                    (
                        target.block_ids[target_start:target_end],
                        self._target_blocks,
                        written,
                        self._target,
                        target_skip,
                    ),
                ):
                    compute_sub_block_ptrs(ids, blocks, pointers, tensor[ref.tensor_idx], skip_count=skip)
                for pair in zip(written.tolist(), read.tolist(), strict=True):
                    ctypes.memmove(*pair, ref.page_size_bytes)
                total += size * ref.page_size_bytes
            source_start, target_start = source_end, target_end
        return total


class CpuWorker(OffloadingWorker):
    """Copies at once: a job is done when it was submitted."""

    def __init__(self, caches: Any, chunk_blocks: int, region: Any) -> None:
        self._region = region
        tensors = [one.tensor for one in caches.tensors]
        rows = [region.create_next_worker_view(one.page_size_bytes * chunk_blocks) for one in caches.tensors]
        self._stores = Copies(tensors, rows, chunk_blocks, caches.group_data_refs, True)
        self._loads = Copies(tensors, rows, chunk_blocks, caches.group_data_refs, False)
        self._done: list[TransferResult] = []

    def _do(self, copies: Copies, job_id: int, source: Any, target: Any) -> bool:
        started = time.perf_counter()
        size = copies.run(source, target)
        seconds = time.perf_counter() - started
        self._done.append(TransferResult(job_id=job_id, success=True, transfer_size=size, transfer_time=seconds))
        return True

    def submit_store(self, job_id: int, source: Any, target: Any) -> bool:
        return self._do(self._stores, job_id, source, target)

    def submit_load(self, job_id: int, source: Any, target: Any) -> bool:
        return self._do(self._loads, job_id, source, target)

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: Any) -> None:
        """All are done."""

    def shutdown(self) -> None:
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):
    def get_worker(self, kv_caches: Any) -> CpuWorker:
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CpuWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker
