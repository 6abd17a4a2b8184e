"""Floor 3: fewer bytes for an update, and what is held back sent later.

Compressors, the exchange that carries what they make, and the feedback of their
errors. All is sent by `reduction`. Imports `base` and `reduction`.
"""
