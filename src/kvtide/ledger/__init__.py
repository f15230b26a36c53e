"""Who holds how much of a device, and who gets it: the file all processes on it share."""
