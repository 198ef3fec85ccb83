"""Ulysses for Hugging Face models, and the tiled computations of Arctic Long Sequence Training (arXiv:2506.13996)."""
