"""Transformations for stale updates: scaled by age, delayed or corrected."""
