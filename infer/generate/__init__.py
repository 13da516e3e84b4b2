"""Room `generate`: see ARCHITECTURE.md."""
