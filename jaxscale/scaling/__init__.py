"""What a compiled program will do, read from its text."""
