"""The commands of `jaxscale`, one module each."""
