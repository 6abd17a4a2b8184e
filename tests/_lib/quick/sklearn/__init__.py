"""Stands for scikit-learn, of which the examples want the digits alone.

Its import takes a process as long as all that it trains in a test.
"""
