"""Storage media: named bytes in a folder, an S3 bucket or memory. Media know nothing about digests, records or runs."""
