"""Runs the steps of `async_parameter_server`: workers compute, the chief has the servers apply.

From bottom to top: `staleness` (pure bookkeeping), `servers` (the processes), `held_arrays`, `worker_step` and
`server_update` (the two halves of a training step), `fleet` (the workers), `scheduler` (who computes what, and what
is applied next), `fit_hook` (what Keras sees).
"""
