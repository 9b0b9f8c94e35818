"""gateway *accepts*: the whole journey of one request."""
