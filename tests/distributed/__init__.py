"""What users do, in worlds of several processes, against one process with the global batch."""
