"""What several scripts train, send or check. common/ imports none of it."""
