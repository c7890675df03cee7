"""Segments as objects in Ceph RADOS."""
