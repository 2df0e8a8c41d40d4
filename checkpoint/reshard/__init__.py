"""A checkpoint's state moved to another layout: strategies, slices of what was saved, files for each rank."""
