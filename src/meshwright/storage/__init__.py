"""Storage: paths on local disks and in buckets (`gs://`, `s3://`),
and what each kind of store can do."""
