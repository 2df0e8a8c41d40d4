"""The loop over epochs, steps and batches, and where a resumed run goes on in its data."""
