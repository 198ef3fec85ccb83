"""Linear layers whose weights are split over ranks, and what a model made of them needs in training.

Which layers of a model are split is decided in `deepspeed/module_inject/`; here is how.
"""
