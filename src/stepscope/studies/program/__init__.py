"""What the record of a recorded training program holds and how it is shown."""
