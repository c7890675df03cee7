"""Segments as files of a folder, local or shared."""
