"""Strict, frozen description of a run. A key that is not declared here is an error; a default lives on its field."""
