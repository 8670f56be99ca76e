"""The Triton back end, for GPUs. Its submodules import Triton; this file does not."""
