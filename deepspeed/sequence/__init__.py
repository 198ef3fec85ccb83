"""Attention and loss over sequences whose tokens are spread over ranks (DeepSpeed-Ulysses, arXiv:2309.14509)."""
