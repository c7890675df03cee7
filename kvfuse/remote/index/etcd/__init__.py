"""The index in etcd."""
