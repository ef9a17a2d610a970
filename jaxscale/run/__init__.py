"""One run from its first step to its last, and what is made of it afterwards."""
