"""What a model does, found by running it: traces, probes, likeness."""
