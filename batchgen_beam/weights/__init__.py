"""Checkpoints: what may be loaded, what it is, and the loading.  Layer 2: knows no sequences and no Beam."""
