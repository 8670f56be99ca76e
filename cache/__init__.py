"""KV memory: block layout, pool, prefix tree and block tables. Knows blocks and tokens, never a socket."""
