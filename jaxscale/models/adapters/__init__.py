"""Models of Flax Linen, Flax NNX, Equinox and Haiku as `ModelFns`.

`convert` recognises a model without importing its library. Each module below calls the
models of one library: it passes the arrays that the call names, `train` and random keys,
draws dropout masks per row, shares BatchNorm statistics, and turns parameters and state
into nested dicts with the paths of the model.
"""
