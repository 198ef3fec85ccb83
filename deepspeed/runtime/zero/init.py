from contextlib import contextmanager


@contextmanager
def suspend_init():
    yield


def is_sharded_by_init(parameter):
    return False
