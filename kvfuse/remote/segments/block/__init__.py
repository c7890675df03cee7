"""Segments on a block device, at fixed places."""
