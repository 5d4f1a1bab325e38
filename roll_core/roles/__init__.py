"""Ray actors that hold models on devices for the life of a leg. Importing a role does not import torch; its process does."""
