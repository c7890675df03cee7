"""What lower rooms ask the block store, which is above them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class BlockStoreView(Protocol):
    """`blocks.block_engine` implements it. Event loop only."""

    def is_block_namespace(self, number: int) -> bool: ...

    @property
    def free_bytes(self) -> int:
        """Bytes of its slabs that have no block."""

    def use(self, number: int) -> tuple[int, int]:
        """(bytes of slots, blocks) of a namespace and those in it."""

    def clear(self, number: int) -> None:
        """All blocks of a namespace are gone: its epoch has grown, and that is stored."""

    def update_quotas(self) -> None:
        """Quotas, or what files have of them, changed."""

    def readers_change(self, directories: Sequence[int] | None) -> None:
        """Before other people may use these directories (None: any) than until now."""

    def statistics(self) -> dict[str, Any]: ...
