"""The rules that every plan obeys."""
