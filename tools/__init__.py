"""What is run by hand: exhaustive searches, proofs by trial, and the table of coverage."""
