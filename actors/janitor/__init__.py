"""The janitor: what has to be done again, or is left over. It only sends commands; hosts write session state."""
