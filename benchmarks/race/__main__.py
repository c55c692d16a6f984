"""The race's command line."""
