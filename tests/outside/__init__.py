"""Models from outside the zoo: as their authors write them, or from their own packages."""
