"""Blocks that hosts read from each other's memory: each host a mount in a network of its own, on this machine."""
