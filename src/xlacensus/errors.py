"""The errors of this package: what was asked, why it is refused,
and the smallest change that fixes it."""


class CensusError(Exception):
    """Program or document that cannot be read, or that the compiler refuses.

    asked: the request.
    truth: the reason, with the arithmetic.
    fix: the smallest change that makes it work.
    """

    def __init__(self, asked: str, truth: str, fix: str):
        self.asked = asked
        self.truth = truth
        self.fix = fix
        super().__init__(f"{asked}\n  because: {truth}\n  fix:     {fix}")
