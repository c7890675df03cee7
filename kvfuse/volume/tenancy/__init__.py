"""Namespaces change here: attributes, records, quotas that hosts grant each other."""
