"""Checkpoints of a run: saved, verified, resharded, and the lock on its directory."""
