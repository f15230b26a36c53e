"""The page, the metrics and the control API of `kvtide serve`: HTTP, on loopback alone."""
