"""The index in a pool of Ceph."""
