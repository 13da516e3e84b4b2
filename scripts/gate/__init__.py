"""Compiling for GPUs on a machine without one."""
