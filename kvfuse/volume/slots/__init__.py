"""Staged bytes become extents in slots, with their headers."""
