"""Hugging Face Jobs: what is submitted, and what is checked before."""
