"""Benchmarks: one file per subject; `tfdist bench SUBJECT` runs one, figures are ratios within one run."""
