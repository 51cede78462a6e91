"""Tables and figures that several studies share."""
