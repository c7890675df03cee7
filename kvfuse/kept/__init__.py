"""Shared memory that outlives a daemon, and the contract of the process that keeps it."""
