"""Algorithm settings: one variant per method, and the sections that all methods share."""
