"""Doors 2 and 3: rings of shared memory for file I/O and block calls, without the kernel on the data path."""
