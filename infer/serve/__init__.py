"""The OpenAI API: its request and response bodies, and batch files of them."""
