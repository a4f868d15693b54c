"""Sharded models in the trainers of other libraries, on real gloo ranks."""
