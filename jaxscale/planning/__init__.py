"""What a compiled program says of memory, bytes and overlap, before anything runs.

`hlo` reads the collectives, `cost` estimates compute, `topologies` has accelerators
that are not here, `fits` and `describe` are about the step of a config.
Nothing is trained.
"""
