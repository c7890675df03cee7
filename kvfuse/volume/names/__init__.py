"""Names and what they mean: lookup, listings, changes, removal of inodes without names."""
