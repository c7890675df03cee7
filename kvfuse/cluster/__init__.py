"""Servers of record and segment stores on this machine, for trying and for tests."""
