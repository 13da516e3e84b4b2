"""`python -m infer` is the command `infer`."""

from infer.cli.main import run

if __name__ == "__main__":
    run()
