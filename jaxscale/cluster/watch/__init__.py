"""Heartbeats, faults by name, and stopping together."""
