"""Placement: which replica gets a request."""
