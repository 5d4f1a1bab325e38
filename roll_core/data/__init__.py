"""Problems: seeded, resumable, held-out ones kept apart."""
