"""Architectures as torch modules with yield points.  Layer 1: knows no sequences, scheduling, files or Beam."""
