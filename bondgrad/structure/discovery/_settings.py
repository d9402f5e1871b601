"""The numbers that a search for structure goes by."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SearchSettings:
    """How thoroughly structure is searched. Changes of outputs are counted in their standard deviations.

    The numbers of rows, rounds and repeats are choices between cost and thoroughness: a round costs `rows` evaluations
    per input, twice as many for a box with noise, and `rows` times `repeats` for the noise itself.
    """

    suspicion: float = 4.0  # a larger change is looked at again: by noise alone it is one comparison in 16,000
    certainty: float = 6.0  # a larger change is believed: by noise alone it is one comparison in 500 million
    # Dependencies.
    rows: int = 8  # at which every input is moved in one round
    fractions: tuple[float, ...] = (1, 1 / 2, 1 / 4, 1 / 64)  # of the way to the farthest value, in turn over the rows
    rounds: int = 4  # at most
    unseen: float = 1e-3  # the part of the dependencies that may be unseen, by estimate, without another round
    repeats: int = 16  # evaluations of a row that show its noise, with a standard error of 22 % if it is normal
    confirmations: int = 8  # pairs of evaluations for each dependency that is looked at again
    false_alarm: float = 0.01  # chance that the pattern has any dependency that is none, for normal noise
    miss: float = 0.01  # chance, at each row, to overlook a change of the size that `Detection.least` states
    # Checks of a known pattern.
    watched_rows: int = 16  # that are moved in one check, in three evaluations each
    watch_confirmations: int = 16  # pairs of evaluations of each row at which such a check suspects a change
    # The length of a memory.
    starts: int = 4  # time steps at which inputs are moved, evenly over the sequence
    sequences: int = 2  # rows of the batch at which they are moved
    step: float = 0.05  # relative to the root mean square of an input; more, if the noise of the outputs needs it
    tail: float = 0.003  # the part of the response (its root mean square) that may come after the horizon
    least_lags: int = 3  # at which a response must be seen, for its decay to be fitted
    # When a layer searches, and what it needs to change its structure.
    least_answered: float = 0.5  # the part of a pattern for which evaluations must not fail, for it to be used
    worthwhile: float = 0.75  # a shorter horizon is used if it is below this part of the present one
    share: float = 0.01  # the part of the evaluations of training that searches may cost, after the first


SETTINGS = SearchSettings()
