"""The run directory as a typed store: a record type for each file, one writer, and one reader that follows a file."""
