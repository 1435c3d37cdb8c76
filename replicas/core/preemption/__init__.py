"""Victim policies, one a file: who gives way when blocks run short."""
