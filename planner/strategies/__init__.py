"""The planning strategies (algorithms that choose a plan), one per file, named as in the literature."""
