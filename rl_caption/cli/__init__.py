"""Programs, their command lines and errors; the only folder that knows the parser library."""
