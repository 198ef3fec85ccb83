"""Collectives that clients import from `deepspeed.runtime.comm`."""
