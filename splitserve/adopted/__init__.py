"""adopted *adopts*: running servers of another engine, behind this gateway."""
