"""SGLang: its hooks on one side, the parts below on the other."""
