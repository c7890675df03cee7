"""Other hosts of a volume: the slabs that they hold, what they change, and what they left behind."""
