"""Names and what they mean: lookup, changes, attributes, blocks by key."""
