"""Faults in the source that the tests must find: see run.py."""
