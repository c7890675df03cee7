"""Measures and limits of namespaces and tiers: counts, speeds, rates, order, access."""
