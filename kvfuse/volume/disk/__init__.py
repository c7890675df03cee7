"""The disk tier: copies of sealed bytes in a folder of this host, for volumes whose segments are elsewhere."""
