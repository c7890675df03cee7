"""Pages of one host pool of SGLang as blocks: in place where a page is in few pieces, else through shared memory."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import monotonic
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvfuse.connectors.sglang.identity import page_name
from kvfuse.connectors.sglang.policies import Pages
from kvfuse.connectors.staging import Doubtful, GatherMemory
from kvfuse.connectors.steady_store import Region, SteadyStore
from kvfuse.usrbio.client import NO_HINTS, PutHints
from kvfuse.usrbio.client.iov import bytes_of

log = logging.getLogger(__name__)

Offsets = npt.NDArray[np.int64]

PIECES_MAX = 6
"""of a page that are blocks of their own; pages in more are gathered into one"""
BEFORE_MAX = 4096
"""pages ahead of those of a call that the cache is asked about with them"""


class PoolPages(ABC):
    """Pages of one pool, by their hashes. A page is one block or several; it is there if all of them are."""

    def __init__(self, store: SteadyStore, pool: Any, tags: Sequence[bytes], page_size: int) -> None:
        """``tags``: of the blocks of a page, see `part_tag`. ``page_size``: of a page, in bytes."""
        self.store = store
        self.pool = pool
        self.tags = list(tags)
        self.page_size = page_size
        self.page_tokens = int(getattr(pool, "page_size", 1) or 1)
        self.doubtful = Doubtful()

    def keys(self, hashes: Sequence[str]) -> list[bytes]:
        return [name + tag for name in map(page_name, hashes) for tag in self.tags]

    def keys_before(self, hashes: Sequence[str]) -> list[bytes]:
        """Of the pages of a prompt ahead of those that a question is about.

        SGLang brings a prompt in several calls. Asked about from the prompt's beginning, the cache knows that the pages
        are one chain, and evicts the end of it first.
        """
        return self.keys(hashes[-BEFORE_MAX:])

    def of_pages(self, found: Pages) -> Pages:
        """From what is there of blocks to what is there of pages."""
        pages: Pages = np.all(found.reshape(-1, len(self.tags)), axis=1)
        return pages

    def leading(self, hashes: Sequence[str], before: Sequence[str] = ()) -> int:
        """How many pages are there from the first on without a gap. ``before``: see `keys_before`."""
        ahead = self.keys_before(before)
        return max(self.store.longest_prefix(ahead + self.keys(hashes)) - len(ahead), 0) // len(self.tags)

    def get(self, hashes: Sequence[str], indices: torch.Tensor, give_up: float) -> Pages:
        """Which pages stand at their ``indices`` of the pool now. ``give_up``: of the monotonic clock."""
        keys = self.keys(hashes)
        got = self._get(keys, self._checked(hashes, indices), give_up)
        self._doubt(keys, got)
        return self.of_pages(got)

    def put(
        self, hashes: Sequence[str], indices: torch.Tensor, give_up: float, hints: PutHints = NO_HINTS,
        before: Sequence[str] = (),
    ) -> Pages:  # fmt: skip
        """Which pages are stored, now or before. ``before``: see `keys_before`."""
        indices = self._checked(hashes, indices)
        keys, ahead = self.keys(hashes), self.keys_before(before)
        there = self.of_pages(self.store.exists(ahead + keys)[len(ahead) :] & ~self.doubtful.among(keys))
        absent = np.flatnonzero(~there).tolist()
        if absent:
            chosen = indices.reshape(-1, self.page_tokens)[absent].reshape(-1)
            new_keys = self.keys([hashes[number] for number in absent])
            there[absent] = self.of_pages(self._put(new_keys, chosen, give_up, hints))
            self.doubtful.forget(new_keys)
        return there

    def _doubt(self, keys: Sequence[bytes], got: Pages) -> None:
        """Have those that were not got be replaced by the next put; but not since there was no daemon."""
        if self.store.is_up:
            self.doubtful.add([key for key, is_got in zip(keys, got.tolist(), strict=True) if not is_got])

    def _checked(self, hashes: Sequence[str], indices: torch.Tensor) -> torch.Tensor:
        """ValueError: these are not the indices of so many pages."""
        if indices is None or indices.numel() != len(hashes) * self.page_tokens:
            count = 0 if indices is None else indices.numel()
            raise ValueError(f"{len(hashes)} pages of {self.page_tokens} with {count} indices")
        return indices

    @abstractmethod
    def _get(self, keys: list[bytes], indices: torch.Tensor, give_up: float) -> Pages:
        """Which blocks were got."""

    @abstractmethod
    def _put(self, keys: list[bytes], indices: torch.Tensor, give_up: float, hints: PutHints) -> Pages:
        """Which blocks are stored."""


class PagesInPlace(PoolPages):
    """Of a pool whose pages are in few pieces: each is a block, moved straight from and to the pool."""

    def __init__(
        self, store: SteadyStore, pool: Any, tags: Sequence[bytes], meta: Callable[[torch.Tensor], Any],
        regions: Sequence[Region],
    ) -> None:  # fmt: skip
        """``meta``: addresses and sizes of the pieces of pages. ``regions``: the memory of the pool, in order."""
        self._meta, self._regions = meta, list(regions)
        self._starts = np.array([region.array.ctypes.data for region in regions], np.int64)
        sizes = meta(torch.zeros(int(getattr(pool, "page_size", 1) or 1), dtype=torch.int64))[1]
        super().__init__(store, pool, tags, sum(sizes))

    @property
    def is_copied_once(self) -> bool:
        return all(region.iov is not None for region in self._regions)

    def _places(self, indices: torch.Tensor) -> tuple[Offsets, Offsets, Offsets]:
        """(number of the region, offset in it, size) of each piece."""
        addresses, sizes = (np.array(column, np.int64) for column in self._meta(indices))
        regions = np.searchsorted(self._starts, addresses, side="right") - 1
        return regions, addresses - self._starts[regions], sizes

    def _move(
        self, move: Callable[..., Any], nothing: int, keys: list[bytes], indices: torch.Tensor, give_up: float
    ) -> tuple[Offsets, Offsets]:
        """(results, sizes) of one call for each region."""
        regions, offsets, sizes = self._places(indices)
        results = np.full(len(keys), nothing, np.int64)
        for number in np.unique(regions).tolist():
            here = np.flatnonzero(regions == number)
            if (left := give_up - monotonic()) > 0:
                chosen = [keys[place] for place in here.tolist()]
                results[here] = move(
                    chosen, self._regions[number], offsets[here].tolist(), sizes[here].tolist(), deadline=left
                )
        return results, sizes

    def _get(self, keys: list[bytes], indices: torch.Tensor, give_up: float) -> Pages:
        results, sizes = self._move(self.store.get, -1, keys, indices, give_up)
        got: Pages = results == sizes
        return got

    def _put(self, keys: list[bytes], indices: torch.Tensor, give_up: float, hints: PutHints) -> Pages:
        put = partial(self.store.put, hints=hints)
        return self._move(put, 0, keys, indices, give_up)[0].astype(np.bool_)


class GatheredPages(PoolPages):
    """Of any pool: each page is one block, gathered in shared memory."""

    def __init__(self, store: SteadyStore, pool: Any, tag: bytes, staging: GatherMemory) -> None:
        empty = pool.get_dummy_flat_data_page()
        self._dtype = empty.dtype
        self._staging = staging
        super().__init__(store, pool, [tag], empty.numel() * empty.element_size())
        self._shows_pages = self._are_views()

    def get_to(self, hashes: Sequence[str], targets: Sequence[torch.Tensor], give_up: float) -> Pages:
        """Which pages stand in these tensors now."""
        keys = self.keys(hashes)

        def take(number: int, part: torch.Tensor) -> None:
            targets[number].view(-1).copy_(part.view(targets[number].dtype))

        got = self._move_out(keys, take, give_up)
        self._doubt(keys, got)
        return got

    def put_from(self, hashes: Sequence[str], values: Sequence[torch.Tensor], give_up: float) -> Pages:
        """Which pages, as these tensors have them, are stored."""
        keys = self.keys(hashes)
        there = self.store.exists(keys) & ~self.doubtful.among(keys)
        absent = np.flatnonzero(~there).tolist()
        new_keys = [keys[number] for number in absent]

        def fill(number: int, part: torch.Tensor) -> None:
            value = values[absent[number]].detach().contiguous()
            part.copy_(value.reshape(-1).view(part.dtype))

        if absent:
            there[absent] = self._move_in(new_keys, fill, give_up)
            self.doubtful.forget(new_keys)
        return there

    def _get(self, keys: list[bytes], indices: torch.Tensor, give_up: float) -> Pages:
        starts = indices[:: self.page_tokens].tolist()

        def take(number: int, part: torch.Tensor) -> None:
            if self._shows_pages:
                page = self._page(starts[number])
                np.copyto(page, part.view(torch.uint8).numpy().reshape(page.shape))
            else:
                self.pool.set_from_flat_data_page(starts[number], part)

        return self._move_out(keys, take, give_up)

    def _put(self, keys: list[bytes], indices: torch.Tensor, give_up: float, hints: PutHints) -> Pages:
        starts = indices[:: self.page_tokens].tolist()

        def fill(number: int, part: torch.Tensor) -> None:
            if self._shows_pages:
                page = self._page(starts[number])
                np.copyto(part.view(torch.uint8).numpy().reshape(page.shape), page)
            else:
                part.copy_(self.pool.get_data_page(starts[number], flat=True))

        return self._move_in(keys, fill, give_up, hints)

    def _move_out(self, keys: list[bytes], take: Callable[[int, torch.Tensor], None], give_up: float) -> Pages:
        """Get pages, and have each that was got taken out of its part of the shared memory."""
        got = np.zeros(len(keys), np.bool_)
        with self._staging.taken(self.page_size) as region:
            for numbers, offsets in self._windows(len(keys), region):
                if (left := give_up - monotonic()) <= 0:
                    break
                sizes = [self.page_size] * len(numbers)
                results = self.store.get([keys[number] for number in numbers], region, offsets, sizes, deadline=left)
                for number, offset, result in zip(numbers, offsets, results.tolist(), strict=True):
                    if result == self.page_size:
                        take(number, self._part(region, offset))
                        got[number] = True
        return got

    def _move_in(
        self, keys: list[bytes], fill: Callable[[int, torch.Tensor], None], give_up: float, hints: PutHints = NO_HINTS
    ) -> Pages:
        """Have each page filled into its part of the shared memory, and put them."""
        stored = np.zeros(len(keys), np.bool_)
        with self._staging.taken(self.page_size) as region:
            for numbers, offsets in self._windows(len(keys), region):
                for number, offset in zip(numbers, offsets, strict=True):
                    fill(number, self._part(region, offset))
                if (left := give_up - monotonic()) <= 0:
                    break
                sizes = [self.page_size] * len(numbers)
                chosen = [keys[number] for number in numbers]
                stored[numbers] = self.store.put(chosen, region, offsets, sizes, deadline=left, hints=hints)
        return stored

    def _windows(self, count: int, region: Region) -> Iterator[tuple[list[int], list[int]]]:
        """(numbers, offsets) of as many pages at a time as the memory has room for."""
        step = len(region.array) // self.page_size
        for start in range(0, count, step):
            numbers = list(range(start, min(start + step, count)))
            yield numbers, [place * self.page_size for place in range(len(numbers))]

    def _page(self, start: int) -> Any:
        """The page where it stands in the pool, as bytes: numpy copies these without threads that wait for each
        other, which costs much on a busy host."""
        return self.pool.get_data_page(start, flat=False).view(torch.uint8).numpy()

    def _are_views(self) -> bool:
        """Whether the pool shows its pages, rather than copies of them."""
        try:
            page = self._page(0)
        except (NotImplementedError, RuntimeError, ValueError, TypeError, AttributeError):
            return False
        return page.nbytes == self.page_size and lie_within([page.ctypes.data], [1], pool_buffers(self.pool))

    def _part(self, region: Region, offset: int) -> torch.Tensor:
        return torch.from_numpy(region.part(offset, self.page_size)).view(self._dtype)


def pool_buffers(pool: Any) -> list[torch.Tensor]:
    """The tensors that a pool's pages lie in, none of them inside another."""
    found = getattr(pool, "kv_buffer", None)
    tensors = list(found) if isinstance(found, (list, tuple)) else [found]
    if callable(more := getattr(pool, "get_hybrid_pool_buffer", None)):
        tensors += more()
    spans: dict[int, torch.Tensor] = {}
    for tensor in sorted((tensor for tensor in tensors if tensor is not None and tensor.numel()), key=_size)[::-1]:
        start, size = tensor.data_ptr(), _size(tensor)
        if not any(base <= start and start + size <= base + _size(other) for base, other in spans.items()):
            spans[start] = tensor
    return [spans[start] for start in sorted(spans)]


def _size(tensor: torch.Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())


def lie_within(addresses: Sequence[int], sizes: Sequence[int], buffers: Sequence[torch.Tensor]) -> bool:
    """Whether every piece lies in one of the buffers."""
    spans = [(tensor.data_ptr(), tensor.data_ptr() + _size(tensor)) for tensor in buffers if tensor.is_contiguous()]
    return all(
        any(start <= address and address + size <= end for start, end in spans)
        for address, size in zip(addresses, sizes, strict=True)
    )


def registered(store: SteadyStore, buffers: Sequence[torch.Tensor]) -> list[Region]:
    return [store.register(bytes_of(tensor)) for tensor in buffers]
