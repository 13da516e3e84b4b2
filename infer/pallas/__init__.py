"""Kernels for NVIDIA GPUs, one a file, each behind an op of `infer.ops` that plain XLA also
serves.

`triton_call` is the one door to Pallas' Triton backend, `mosaic_call` (where a kernel has that
form) the one to Mosaic GPU, so that a kernel can move from one backend to another.
"""
