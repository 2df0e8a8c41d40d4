"""Random number generators, torch's and the user's own: found, read in microseconds, put back."""
