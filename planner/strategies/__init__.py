"""The strategies, one per file, named as in the literature."""
