"""The train step and all that belongs to it: state, losses, guards, the loop."""
