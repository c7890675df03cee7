"""Records in one LMDB file, for volumes of one host."""
