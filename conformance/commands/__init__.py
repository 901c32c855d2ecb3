"""The commands of `bitforbit`, one module each: its options, and what it prints."""
