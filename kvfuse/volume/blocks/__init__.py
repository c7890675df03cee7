"""Block calls: whole files by key, where they are, and when clients find them themselves."""
