"""Speed of this machine, of our engine on it, and of named peers beside it; `infer bench`."""
