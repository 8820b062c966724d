"""Models of `plan`, and what `profile` measures of a model at each depth."""
