"""Who on this host is still alive: names in shared memory, robust mutexes, pidfds."""
