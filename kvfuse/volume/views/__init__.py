"""Memory that other threads and clients see: content maps, the shared-memory tier, arenas."""
