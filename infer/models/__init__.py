"""Room `models`: see ARCHITECTURE.md."""
