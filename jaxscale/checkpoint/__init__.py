"""Save, verify, restore and reshard the checkpoints of a run, and lock its workdir."""
