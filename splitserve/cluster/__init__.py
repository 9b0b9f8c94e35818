"""cluster *supervises*: start, watch, restart, drain."""
