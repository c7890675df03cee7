"""The index in a Redis server."""
