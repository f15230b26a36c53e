"""Physical memory: reserve, create, map, unmap, release, on a GPU or on the host."""
