"""Opens the cold tier of a volume as its options say."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvfuse.errors import ConfigError
from kvfuse.options.config import Options
from kvfuse.volume.cold.cold_index import Group
from kvfuse.volume.opening.engines import cold_bucket

if TYPE_CHECKING:
    from kvfuse.volume.cold.cold_tier import ColdTier

GRAVES_FILE = "cold-graves"
"""in the volume's folder"""


def open_cold(
    options: Options, volume_id: bytes, is_valid: Callable[[Group], bool], latest: Callable[[], int]
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
