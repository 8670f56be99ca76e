"""Triton back end for GPUs. Nothing is imported here: a submodule needs Triton, and only its user pays for it."""
