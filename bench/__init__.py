"""Benchmarks: `python -m bench NAME [--quick]` runs one, together with its limit and its peers."""
