"""Config of algorithms: one variant per method, and the sections that all methods share."""
