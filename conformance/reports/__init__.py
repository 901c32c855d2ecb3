"""The reports of a run: terminal, JSON, JUnit, one HTML page, a badge, and two runs compared."""
