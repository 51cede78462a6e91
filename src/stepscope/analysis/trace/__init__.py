"""Traces of a program's steps: read, attributed to what launched what, and added up."""
