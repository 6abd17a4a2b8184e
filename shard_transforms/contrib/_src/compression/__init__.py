"""Compressed reductions with error feedback.

Compressors, the exchange of their payloads, and the feedback of their errors.
"""
