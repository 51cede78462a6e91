"""Naive attention of any model replaced by one fused kernel while it runs."""
