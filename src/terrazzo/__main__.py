"""`python -m terrazzo` is the command `terrazzo`."""

from terrazzo.cli import main

if __name__ == "__main__":
    main()
