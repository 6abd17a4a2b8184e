"""The text of compiled programs (HLO), parsed and followed."""
