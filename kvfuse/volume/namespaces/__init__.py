"""Namespaces: folders with a policy, what they hold, and the caches among them."""
