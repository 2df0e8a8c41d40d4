"""Names that other frameworks gave to what lastwords does, for scripts that come from there: one module for each."""
