"""Steps whose batch has open sizes: expressions of the sizes, guards, and the plain step for given sizes."""
