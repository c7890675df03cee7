"""The records: keys and values, checksums, number ranges, transactions, membership."""
