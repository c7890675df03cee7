"""Opens the cold tier of a volume as its options say."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from kvfuse.errors import ConfigError
from kvfuse.options.config import Options
from kvfuse.remote.index.api import BlockIndex
from kvfuse.volume.cold.cold_index import ColdGroup
from kvfuse.volume.opening.engines import cold_bucket

if TYPE_CHECKING:
    from kvfuse.volume.cold.cold_tier import ColdTier
    from kvfuse.volume.cold.hosts_cold_tier import SharedColdTier

GRAVES_FILE = "cold-graves"
"""in the volume's folder"""


async def remove_cold(options: Options, volume_id: bytes, step: Callable[[str], None]) -> None:
    """Delete all objects of the cold tier of a volume that is being destroyed. ConfigError, EngineError."""
    options_of_cold = cold_bucket(options, volume_id)
    if options_of_cold is None:
        return
    from kvfuse.remote.bucket import Bucket

    bucket = Bucket(options_of_cold, options_of_cold.put_deadline, options_of_cold.in_flight_max)
    step(f"removing cold blocks in {bucket.title}")
    for folder in ("blocks/", "hosts/"):
        while names := [one.name for one in await bucket.list(folder)]:
            await bucket.delete(names)


async def ask_bucket(options: Options) -> str:
    """Look into the bucket of the cold tier. Its name. ConfigError, EngineError."""
    found = cold_bucket(options, bytes(16))
    assert found is not None
    from kvfuse.remote.bucket import Bucket

    bucket = Bucket(found, found.deadline, found.in_flight_max)
    await bucket.list("blocks/")
    return f"s3://{found.bucket}"


def open_shared_cold(
    options: Options, volume_id: bytes, client: int, index: BlockIndex, is_valid: Callable[[ColdGroup], bool],
    members: Callable[[], Collection[int]], heir: Callable[[int], int],
) -> SharedColdTier | None:  # fmt: skip
    """As `open_cold`, of a volume that hosts share."""
    bucket = cold_bucket(options, volume_id)
    if bucket is None or options.mount.read_only:
        return None
    from kvfuse.volume.cold.hosts_cold_tier import SharedColdTier

    return SharedColdTier(bucket, volume_id, client, index, is_valid, members, heir)


def open_cold(
    options: Options, volume_id: bytes, is_valid: Callable[[ColdGroup], bool], latest: Callable[[], int]
) -> ColdTier | None:
    """None: the volume has none, or is mounted read-only. ConfigError. See `ColdTier` for the callables."""
    bucket = cold_bucket(options, volume_id)
    if bucket is None or options.mount.read_only:
        return None
    from kvfuse.volume.cold.cold_tier import ColdTier

    try:
        return ColdTier(bucket, volume_id, options.volume_path / GRAVES_FILE, is_valid, latest)
    except OSError as error:
        raise ConfigError(f"{options.volume_path / GRAVES_FILE} cannot be used: {error.strerror}") from None
