"""Schema of run files and nightly files, and their loading. An undeclared key is an error; a default is on its field."""
