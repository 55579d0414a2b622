"""Benchmarks: `python -m bench NAME [--quick]` runs one against its limit and its peers in the same run."""
