"""The suite that holds a backend to the specification (SPEC 15 to 20)."""
