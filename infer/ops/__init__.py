"""Room `ops`: see ARCHITECTURE.md."""
