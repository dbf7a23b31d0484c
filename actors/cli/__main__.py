"""`python -m actors.cli`, the same as `worldline`."""

from actors.cli.main import main

if __name__ == "__main__":
    main()
