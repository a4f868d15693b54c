"""Every role a module can take on, through every event of a model's life."""
