"""Ray actors that hold models on devices for the life of a leg. Importing a role costs no torch: its process does that."""
