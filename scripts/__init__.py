"""Scripts for maintainers; a package so that tests can import them."""
