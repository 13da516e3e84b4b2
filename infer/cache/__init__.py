"""The key/value cache: its bytes, its pages, and the pure functions that hand pages out and take
them back.
"""
