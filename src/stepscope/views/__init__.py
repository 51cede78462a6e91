"""Tables, figures and findings that several studies and the advisor share. Pure."""
