"""One strategy a file, named as the literature names it."""
