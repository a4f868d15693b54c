"""Random small models, a right plan for each, and what becomes of them when either is edited."""
