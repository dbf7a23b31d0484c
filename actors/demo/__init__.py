"""`worldline demo`: a world driven by a program that shares no code with us, and pictures of what it saw."""
