"""Check and repair of a volume: fsck, rebuild, scrub."""
