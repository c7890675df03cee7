"""Defines what client and daemon of a ring share: layouts, queues, keys."""
