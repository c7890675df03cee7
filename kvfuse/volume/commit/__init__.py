"""Commits pending changes of memory to the record store: plans, sends and settles them."""
