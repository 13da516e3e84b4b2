"""The type checker that the import hook of conftest.py puts on every function of `infer`."""

from beartype import BeartypeConf, beartype

# An int is a float to every static checker (PEP 484), and users pass `temperature=0`.
checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
