"""What is run by hand: proofs by exhaustion and by trial, measurements, the tables of docs/."""
