"""What chunks, ops and whole programs cost, in seconds and in bytes. It knows no torch."""
