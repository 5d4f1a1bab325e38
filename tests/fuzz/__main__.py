"""Mutate every shipped config and stored runs, and look for what a user must never see.

python -m tests.fuzz          10,000 configs, 1,000 stores; exits with 1 if anything was found
"""

from tests.fuzz import configs

NUM_CONFIGS, NUM_STORES = 10_000, 1_000


def main() -> None:
    """Run both; a finding exits with 1."""
    from tests.fuzz import stores

    configs.main(NUM_CONFIGS)
    stores.main(NUM_STORES)


if __name__ == "__main__":
    main()
