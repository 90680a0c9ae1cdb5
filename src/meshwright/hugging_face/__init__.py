"""Weights of other programs: Hugging Face folders read, checked, and written."""
