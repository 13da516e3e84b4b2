"""Inputs that several tests share."""
