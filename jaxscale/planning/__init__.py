"""What compiled programs say of memory, bytes and time, for chips that need not be here."""
