"""Room `cache`: see ARCHITECTURE.md."""
