"""Making a volume, opening its engines, holding it, loading its state."""
