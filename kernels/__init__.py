"""Attention and data movement on tensors: Triton for GPUs, native code for CPUs, plain torch as the oracle.

This room knows tensors only, never a conversation. Importing it costs nothing: no torch, no Triton, no
transformers; the submodules bring what they need.
"""
