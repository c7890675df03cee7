"""Blocks of other hosts: what they have in their tiers is read from them, and they read what this host has."""
