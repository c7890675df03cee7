"""Segments in the objects of a bucket (S3)."""
