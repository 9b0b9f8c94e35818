"""cli *starts*: the command line."""
