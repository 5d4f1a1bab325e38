"""Operations settings: legs, cluster and placement, store, tracking, weight transport, nightly runs."""
