"""Records in etcd, for volumes of many hosts."""
