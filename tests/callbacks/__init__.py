"""Tests of tfdist.callbacks."""
