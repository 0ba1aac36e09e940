"""What several scripts train, send or check. The core imports nothing of it."""
