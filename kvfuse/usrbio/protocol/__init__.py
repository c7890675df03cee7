"""What both sides of a ring agree on: layouts, queues, keys."""
