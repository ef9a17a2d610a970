"""Rendezvous: connect the processes of a run before the first use of JAX."""
