"""Scripts that run under the peers' Python; they import nothing of `infer`."""
