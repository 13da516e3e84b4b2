"""Checkpoints that other tools have quantised, as the packed weights that they are.

A folder is read as if it were of our own form (`infer.weights.packed_form`): each quantised matrix
becomes the parts of a planar `QArray`, its codes, scales and zero points as they stand in the file,
never by way of floats.  One module a family of layouts; `translate` has the list.
"""
