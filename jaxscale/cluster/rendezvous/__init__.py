"""How the processes of a job meet before JAX is asked."""
