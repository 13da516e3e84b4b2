"""Speculative decoding: what verifies drafts, and what drafts without training.

Pure functions over pytrees; the generation loop does not call them yet.
"""
