"""store *keeps*: KV blocks by key, outside workers."""
