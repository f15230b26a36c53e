"""How much KV cache a model takes: pure arithmetic on its configuration."""
