"""kv *remembers*: keys, block table, references, prefix cache, leases, quarantine. No tensors."""
