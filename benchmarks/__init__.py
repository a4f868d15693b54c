"""Benchmarks: each prints how tpplan compares with its peers."""
