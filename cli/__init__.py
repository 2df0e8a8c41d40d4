"""The command `lastwords`: one module for each group of subcommands; `main` has them all, `tables` prints."""
