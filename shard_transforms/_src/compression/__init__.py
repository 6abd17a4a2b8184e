"""Floor 3: compressed reductions with error feedback.

Compressors, the exchange of their payloads, and the feedback of their errors.
`reduction` sends everything. Imports `base` and `reduction`.
"""
