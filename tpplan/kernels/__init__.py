"""Fused kernels on local tensors: what is bound by memory, in one pass over it.

Each is an op of PyTorch's with a Triton body and a reference: Triton runs on GPUs, and on the CPU
under its interpreter (``TRITON_INTERPRET=1``); everything else is the reference's.
"""
