"""Replays traces over simulated replicas: real scheduling and placement, computed time."""
