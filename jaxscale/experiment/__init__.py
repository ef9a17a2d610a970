"""From a Config to an Experiment: derived numbers, model, layout, exchange, phases."""
