"""DistributedDataParallel: every module that it wraps, its communication hooks, the order of its buckets."""
