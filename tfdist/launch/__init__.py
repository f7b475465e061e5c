"""Starts worlds: plans as data, one place that starts and ends processes."""
