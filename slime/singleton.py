"""A metaclass for classes of which each process has one object."""

from __future__ import annotations

import threading


class SingletonMeta(type):
    """`class Judge(metaclass=SingletonMeta)`: the first call makes the object, later calls return it.

    The arguments of later calls are not read. A subclass has an object of its own. Safe in threads.
    """

    _instances: dict[type, object] = {}
    _lock = threading.RLock()

    def __call__(cls, *args: object, **kwargs: object) -> object:
        with SingletonMeta._lock:
            if cls not in SingletonMeta._instances:
                SingletonMeta._instances[cls] = super().__call__(*args, **kwargs)
            return SingletonMeta._instances[cls]

    @staticmethod
    def clear_all_instances() -> None:
        """Forget all objects, so that the next calls make new ones."""
        with SingletonMeta._lock:
            SingletonMeta._instances.clear()
