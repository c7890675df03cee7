"""Modules in C, and their wrappers with twins in Python."""
