"""Construction of an `Experiment` from a `Config`: model, layout, exchange, phases."""
