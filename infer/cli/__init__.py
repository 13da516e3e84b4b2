"""The command line: arguments -> configuration -> one call of the Python API."""
