"""Ways to turn the ranks' gradients into one update: one small base, one file per strategy."""
