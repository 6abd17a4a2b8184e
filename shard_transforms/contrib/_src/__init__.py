"""The implementation of `contrib`, with one folder or module per feature."""
