"""Hand-written Triton kernels, called through jax-triton: one file per kernel.

They serve the day that Pallas-Triton goes, behind the same ops, and import nothing of
`infer.pallas`.  A kernel's file imports triton, which the extras cuda12 and cuda13 install; ops
import it on first use.  What the packages lack, `infer.jax_triton.packages` says without them.
"""
