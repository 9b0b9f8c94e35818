"""latency *predicts*: the time of a step and its error, fitted while the workers run."""
