"""What lower rooms ask the block store, which is above them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from kvfuse.volume.measures.measures import SegmentsTier
from kvfuse.volume.views.neighbours import Uses


class BlockStoreView(Protocol):
    """`blocks.block_engine` implements it. Event loop only."""

    def is_block_namespace(self, number: int) -> bool: ...

    def use(self, number: int) -> tuple[int, int]:
        """(bytes of slots, blocks) of a namespace and those in it."""

    def evict(self, number: int, size: int) -> None:
        """Remove blocks of a namespace, and those in it, of so many bytes: another host lacks the room."""

    def describe(self, number: int, unread: Mapping[str, int], tier: SegmentsTier) -> dict[str, Any]:
        """Figures of a namespace, as `Cache.statistics`."""

    def lender(self) -> object:
        """What threads send blocks from that are in memory: of `native._blocks.Core.lender`."""

    def take_uses(self) -> Uses:
        """Blocks of other hosts that were used here since the last call, those that were used most often first."""

    def hear_uses(self, uses: Uses) -> None:
        """Another host used these blocks of this one."""

    async def kept_at(self, addr: int, sequence: int) -> memoryview | None:
        """The block at an address, if it is that one, from the disk tier."""

    def room(self) -> tuple[int, int]:
        """(blocks, bytes that are free in the slabs that the store has) of the volume."""

    def clear(self, number: int) -> None:
        """All blocks of a namespace are gone: its epoch has grown, and that is stored."""

    def settings_changed(self, number: int) -> None:
        """Another host may have changed the settings of a namespace, or it is none any more."""

    async def list_names(self, directory: int, after: int, limit: int) -> tuple[list[bytes], int]:
        """Names of blocks for who follows a directory, and where to go on; 0: there are no more."""

    def advance(self, number: int, seconds: float) -> None:
        """Move the clock by which a namespace judges its blocks."""

    def update_quotas(self) -> None:
        """Quotas, or what files have of them, changed."""

    def note_file(self, directory: int, namespace: int, name: bytes) -> None:
        """A name of a directory is about to mean an ordinary file."""

    def note_directories(self, directory: int, namespace: int, names: Collection[bytes]) -> None:
        """Names of a directory mean directories, or are about to."""

    async def has_names(self, directory: int) -> bool:
        """Blocks, or files that become some, are in a directory. EngineTimeout: that is not known yet."""

    def directory_removed(self, directory: int) -> None: ...
    def readers_change(self, directories: Sequence[int] | None) -> None:
        """Before other people may use these directories (None: any) than until now."""

    def volume_resized(self) -> None:
        """The volume has more slabs, or fewer: nothing was in those."""

    def statistics(self) -> dict[str, Any]: ...
