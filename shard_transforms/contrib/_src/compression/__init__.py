"""Floor 4: compressed reductions with error feedback.

Compressors, the exchange of their payloads, and the feedback of their errors.
Imports `base`, `reduction` and `exchanges`, which contain all communication.
"""
