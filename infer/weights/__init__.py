"""Room `weights`: see ARCHITECTURE.md."""
