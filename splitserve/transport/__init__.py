"""transport *moves*: bytes between pools."""
