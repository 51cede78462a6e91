"""What `stepscope.Observer` writes: its lines, and the detection of deviations in them."""
