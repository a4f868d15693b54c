"""``verify`` against plans that are right and faults that are planted."""
