"""One coherent picture of a device and all that live on it."""
