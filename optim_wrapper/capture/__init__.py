"""What is copied or witnessed in each step, and where the writer finds it during an incident."""
