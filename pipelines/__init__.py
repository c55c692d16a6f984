"""The command line: wiring, progress and reports.  Layer 6: uses only public names of what lies below."""
