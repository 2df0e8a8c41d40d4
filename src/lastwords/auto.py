"""`import lastwords.auto`, before anything else in a script under torchrun: what `lastwords run --auto` does to it."""

from lastwords.integrations.auto import install

install()
