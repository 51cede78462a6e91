"""The training step that several studies measure: workload, construction, timing, memory."""
