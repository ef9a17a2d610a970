"""How the processes of a run find each other, before JAX is asked for anything."""
