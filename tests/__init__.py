"""A package, since verl installs a top-level `tests` of its own, which would be found first."""
