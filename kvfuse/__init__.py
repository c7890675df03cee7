"""A storage client for KV caches: many blocks in a few large preallocated segments, seen as a file system."""

__version__ = "0.1.0"
