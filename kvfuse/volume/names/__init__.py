"""Looks names up, lists and changes them, and removes inodes without names."""
