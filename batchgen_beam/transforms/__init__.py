"""Layer 5: the Beam transforms between files and the engine, and the life of the engine in a worker process."""
