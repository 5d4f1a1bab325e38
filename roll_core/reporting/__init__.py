"""Pages a person looks at, made from manifests."""
