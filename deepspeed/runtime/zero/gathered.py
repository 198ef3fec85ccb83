from contextlib import contextmanager


@contextmanager
def gather_all(coordinator):
    buckets = [b for b in coordinator.buckets if b.is_sharded]
    coordinator.finish_pending()
    coordinator.pin(buckets, "engine.gathered()")
    try:
        yield
    finally:
        coordinator.unpin(buckets)
