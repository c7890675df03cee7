"""Bytes of files: reading, writing, cutting, fetching ahead, following the changes of other hosts."""
