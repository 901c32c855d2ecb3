"""What a figure is and how it is taken."""
