"""The shared-memory tier: arenas that clients map, their blocks and indexes, what goes first."""
