"""Tests of tfdist; a package, so that the ranks of a world import a test module by its name."""
