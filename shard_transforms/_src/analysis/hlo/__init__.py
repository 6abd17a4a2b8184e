"""Parsing and dataflow analysis of the text of compiled programs (HLO)."""
