"""Room `cli`: see ARCHITECTURE.md."""
