"""Servers of record and segment stores on this machine, for trying (``kvfuse cluster-dev``) and for tests."""
