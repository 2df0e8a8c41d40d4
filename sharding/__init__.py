"""Which ranks hold which part of the training state: found, declared, agreed, checked."""
