"""Content maps, which other threads read, and small interfaces that rooms above share."""
