"""What is in memory: inodes, chunks, known names, and what the parts of a volume share."""
