"""What goes wrong, where, and what to do about it."""


class KvtuneError(RuntimeError):
    def __init__(self, what: str, hint: str) -> None:
        super().__init__(f"{what}\nhint: {hint}")
