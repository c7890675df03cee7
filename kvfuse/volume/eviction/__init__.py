"""Removal of files of caches: evicted for room, or swept after a clear."""
